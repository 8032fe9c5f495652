"""Native kernels against the references: odd sizes, strides, poisoned surroundings, rows apart from each other."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dalsegno.ops import reference
from dalsegno.ops.batch import StateBatch, StateLayerCache
from dalsegno.ops.causal_conv import causal_conv
from dalsegno.ops.experts import routed_experts
from dalsegno.ops.gated_delta import gated_delta_rule
from dalsegno.ops.linear import linear
from dalsegno.ops.native.library import Kernels, kernels_in_use
from dalsegno.ops.norms import rms_norm
from dalsegno.ops.selective_scan import selective_scan
from tests.ops.memory import NAN, SlabMemory, same_memory, state_cache
from tests.ops.state_steps import seed_blocks

ROWS = [1, 2, 3, 4, 5, 9]
SIZES = [1, 7, 16, 37, 64, 131]


class Spy:
    """The kernels, and the names of those that were called."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            self.called.append(name)
            getattr(self.kernels, name)(*arguments)

        return call


def _native(kernels: Kernels, work: Callable[[], Tensor], *names: str) -> Tensor:
    """Return the result of `work`, which has to call just these kernels."""
    spy: Any = Spy(kernels)
    with kernels_in_use(spy):
        result = work()
    assert spy.called == list(names)
    return result


def _spaced(*shape: int, seed: int) -> Tensor:
    """Return random `[T, ...]` whose rows lie apart in memory, with NaN before, between and after them."""
    inner = torch.Size(shape[1:])
    wide = torch.full((shape[0], inner.numel() + 7), NAN)
    rows: Tensor = wide[:, 3 : 3 + inner.numel()].unflatten(1, inner)
    rows.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    return rows


def _close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("out_size", [1, 3, 4, 41])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_linear(rows: int, size: int, out_size: int, kernels: Kernels) -> None:
    x, bias = _spaced(rows, size, seed=1), _spaced(1, out_size, seed=3)[0]
    weight = torch.cat([torch.randn(out_size, size), torch.full((1, size), NAN)])[:out_size]
    for offset in (None, bias):
        out = _native(kernels, lambda offset=offset: linear(x, weight, offset), "linear")  # type: ignore[misc]
        _close(out, reference.linear(x, weight, offset))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("heads", [None, 1, 3])
@pytest.mark.parametrize("gated", [False, True])
def test_rms_norm(gated: bool, heads: int | None, size: int, kernels: Kernels) -> None:
    shape = (5, size) if heads is None else (5, heads, size)
    hidden, gate = _spaced(*shape, seed=1), _spaced(*shape, seed=2) * 8 if gated else None
    for number, weight in enumerate([torch.randn(size), *([torch.randn(heads, size)] if heads else [])]):
        options: dict[str, Any] = {"offset": float(number), "gate": gate}
        out = _native(kernels, lambda w=weight, o=options: rms_norm(hidden, w, 1e-6, **o), "rms_norm")  # type: ignore[misc]
        _close(out, reference.rms_norm(hidden, weight, 1e-6, **options))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("size", "inner"), [(16, 16), (37, 5), (5, 37), (64, 33)])
@pytest.mark.parametrize(("rows", "per_row"), [(1, 1), (1, 3), (5, 2), (9, 3)])
def test_routed_experts(rows: int, per_row: int, size: int, inner: int, gated: bool, kernels: Kernels) -> None:
    g = torch.Generator().manual_seed(rows)
    # With few experts a tile of rows is full, and with one choice of all the expert that nobody chose stays unread.
    experts = torch.stack([torch.randperm(4, generator=g)[:per_row] for _ in range(rows)])
    up, down = torch.randn(5, inner * (1 + gated), size), torch.randn(5, size, inner)
    up[4:], down[4:] = NAN, NAN
    x, weights = _spaced(rows, size, seed=1), torch.rand(rows, per_row, generator=g)
    arguments = (x, experts, weights, up / size**0.5, down / inner**0.5)
    out = _native(kernels, lambda: routed_experts(*arguments, gated=gated), "routed_experts")
    _close(out, reference.routed_experts(*arguments, gated=gated))


def _decode_batch(rows: int, per_slab: int, shape: tuple[int, ...]) -> tuple[SlabMemory, StateBatch]:
    """Return a decode step: row 0 starts from nothing, the others go on in place or from a block that stays."""
    memory = SlabMemory({"state": shape, "rest": (3,)}, 1 + -(-2 * rows // per_slab), per_slab)
    blocks = range(per_slab, per_slab + 2 * rows)
    seed_blocks(memory, blocks[:rows])
    write = [blocks[rows + row] if row % 2 else blocks[row] for row in range(rows)]
    return memory, StateBatch.build(range(rows + 1), [0, *blocks[1:rows]], write, (), per_slab)


def _check_step(
    kernels: Kernels,
    name: str,
    op: Callable[[StateLayerCache], Tensor],
    definition: Callable[[StateLayerCache], Tensor],
    memory: SlabMemory,
    batch: StateBatch,
) -> None:
    other = memory.clone()
    out = _native(kernels, lambda: op(state_cache(memory, batch)), name)
    _close(out, definition(state_cache(other, batch)))
    same_memory(memory, other)


@pytest.mark.parametrize("per_slab", [1, 3])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(1, 1), (5, 16), (16, 5), (37, 131), (64, 64), (128, 80)])
@pytest.mark.parametrize("repeats", [1, 2])
def test_gated_delta_step(repeats: int, key_dim: int, value_dim: int, per_slab: int, kernels: Kernels) -> None:
    rows, key_heads = 5, 3
    heads = key_heads * repeats
    memory, batch = _decode_batch(rows, per_slab, (heads, key_dim, value_dim))
    inputs = (
        _spaced(rows, key_heads, key_dim, seed=1),
        _spaced(rows, key_heads, key_dim, seed=2),
        _spaced(rows, heads, value_dim, seed=3),
        -_spaced(rows, heads, seed=4).square(),
        _spaced(rows, heads, seed=5).sigmoid(),
    )
    _check_step(
        kernels,
        "gated_delta_step",
        lambda cache: gated_delta_rule(*inputs, cache, part="state"),
        lambda cache: reference.gated_delta_rule(*inputs, cache, part="state"),
        memory,
        batch,
    )


@pytest.mark.parametrize("per_slab", [1, 3])
@pytest.mark.parametrize(("head_dim", "state_dim"), [(1, 1), (5, 16), (16, 5), (3, 131), (64, 64)])
@pytest.mark.parametrize("groups", [1, 2])
def test_scan_step(groups: int, head_dim: int, state_dim: int, per_slab: int, kernels: Kernels) -> None:
    rows, heads = 5, 6
    memory, batch = _decode_batch(rows, per_slab, (heads, head_dim, state_dim))
    inputs = (
        _spaced(rows, heads, head_dim, seed=1),
        _spaced(rows, heads, seed=2).square(),
        -torch.rand(heads),
        _spaced(rows, groups, state_dim, seed=3) * state_dim**-0.5,
        _spaced(rows, groups, state_dim, seed=4) * state_dim**-0.5,
        torch.randn(heads),
    )
    _check_step(
        kernels,
        "scan_step",
        lambda cache: selective_scan(*inputs, cache, part="state"),
        lambda cache: reference.selective_scan(*inputs, cache, part="state"),
        memory,
        batch,
    )


@pytest.mark.parametrize("per_slab", [1, 3])
@pytest.mark.parametrize("kernel", [2, 3, 4, 7])
@pytest.mark.parametrize("channels", [1, 5, 64])
@pytest.mark.parametrize("activation", ["silu", None])
def test_conv_step(activation: str | None, channels: int, kernel: int, per_slab: int, kernels: Kernels) -> None:
    rows = 5
    memory, batch = _decode_batch(rows, per_slab, (channels, kernel - 1))
    x, weight = _spaced(rows, channels, seed=1), torch.randn(channels, kernel)
    for bias in (None, torch.randn(channels)):
        _check_step(
            kernels,
            "conv_step",
            lambda cache, b=bias: causal_conv(x, weight, b, cache, "state", activation),  # type: ignore[misc]
            lambda cache, b=bias: reference.causal_conv(x, weight, b, cache, "state", activation),  # type: ignore[misc]
            memory,
            batch,
        )


def _rowwise() -> dict[str, Callable[[Tensor], Tensor]]:
    weight, up, down = torch.randn(41, 37), torch.randn(3, 10, 37), torch.randn(3, 37, 5)

    def experts(x: Tensor, *, gated: bool) -> Tensor:
        chosen, shares = torch.tensor([[0, 2]]).expand(len(x), 2), torch.full((len(x), 2), 0.5)
        return routed_experts(x, chosen, shares, up if gated else up[:, :5].contiguous(), down, gated=gated)

    return {
        "linear": lambda x: linear(x, weight),
        "rms_norm": lambda x: rms_norm(x, weight[0], 1e-6, gate=x),
        "routed_experts": lambda x: experts(x, gated=True),
        "routed_experts, not gated": lambda x: experts(x, gated=False),
    }


@pytest.mark.parametrize("name", _rowwise())
def test_a_row_is_the_same_whatever_rows_come_with_it(name: str, kernels: Kernels) -> None:
    work, kernel = _rowwise()[name], name.partition(",")[0]
    x = torch.randn(9, 37)
    whole = _native(kernels, lambda: work(x), kernel)
    for rows in ([0], [8], [3, 1], [2, 4, 6], [7, 6, 5, 4, 3, 2, 1, 0]):
        assert torch.equal(_native(kernels, lambda rows=rows: work(x[rows]), kernel), whole[rows])  # type: ignore[misc]


@pytest.mark.parametrize("name", _rowwise())
@pytest.mark.parametrize("place", [0, 20, 36])
def test_a_nan_spoils_its_own_row_and_no_other(place: int, name: str, kernels: Kernels) -> None:
    work, kernel = _rowwise()[name], name.partition(",")[0]
    x = torch.randn(9, 37)
    whole = _native(kernels, lambda: work(x), kernel)
    x[4, place] = NAN
    out = _native(kernels, lambda: work(x), kernel)
    assert bool(out[4].isnan().all())
    others = [row for row in range(9) if row != 4]
    assert torch.equal(out[others], whole[others])


def test_a_decay_that_is_no_number_shows_in_output_and_state(kernels: Kernels) -> None:
    heads, scalars, broken = torch.randn(2, 1, 3), torch.rand(2, 1), torch.tensor([[0.5], [NAN]])
    rules: dict[str, Callable[[StateLayerCache], Tensor]] = {
        "gated_delta_step": lambda cache: gated_delta_rule(heads, heads, heads, -broken, scalars, cache, "state"),
        "scan_step": lambda cache: selective_scan(
            heads, broken, -torch.ones(1), heads, heads, torch.ones(1), cache, "state"
        ),
        "scan_step, rate": lambda cache: selective_scan(
            heads, scalars, torch.tensor([NAN]), heads, heads, torch.ones(1), cache, "state"
        ),
    }
    for name, rule in rules.items():
        memory, batch = _decode_batch(2, 1, (1, 3, 3))
        out = _native(kernels, lambda r=rule, m=memory, b=batch: r(state_cache(m, b)), name.partition(",")[0])  # type: ignore[misc]
        assert bool(out[1].isnan().all())
        assert bool(memory.block("state", batch.write_blocks[1]).isnan().all())
        assert bool(memory.block("state", batch.write_blocks[0]).isnan().all()) == ("rate" in name)


@pytest.mark.parametrize("activation", ["silu", None])
def test_a_nan_in_a_window_or_a_state_shows(activation: str | None, kernels: Kernels) -> None:
    memory, batch = _decode_batch(2, 1, (3, 3))
    memory.block("state", batch.read_blocks[1])[1, 0] = NAN
    x, weight = torch.randn(2, 3), torch.randn(3, 4)
    out = _native(
        kernels, lambda: causal_conv(x, weight, None, state_cache(memory, batch), "state", activation), "conv_step"
    )
    assert out.isnan().nonzero().tolist() == [[1, 1]]
    memory, batch = _decode_batch(2, 1, (1, 3, 5))
    memory.block("state", batch.read_blocks[1])[0, 1, 2] = NAN
    heads = torch.randn(2, 1, 3)
    scalars = torch.zeros(2, 1)
    out = _native(
        kernels,
        lambda: gated_delta_rule(
            heads, heads, torch.randn(2, 1, 5), scalars, scalars, state_cache(memory, batch), "state"
        ),
        "gated_delta_step",
    )
    assert out.isnan().nonzero().tolist() == [[1, 0, 2]]


@pytest.mark.parametrize("x", [-1e30, -200.0, -88.5, -87.0, -20.0, -1e-3, 0.0, 1e-3, 20.0, 87.0, 200.0, 1e30])
def test_silu_of_any_size(x: float, kernels: Kernels) -> None:
    gate = torch.full((1, 33), x)
    out = _native(kernels, lambda: rms_norm(torch.ones(1, 33), torch.ones(33), 0.0, gate=gate), "rms_norm")
    torch.testing.assert_close(out, torch.nn.functional.silu(gate), atol=1e-30, rtol=1e-6)


def test_exponentials_are_exact_to_a_few_ulp(kernels: Kernels) -> None:
    steps = torch.linspace(0.0, 86.0, 20_001).view(-1, 1)
    memory, batch = _decode_batch(len(steps), 1, (1, 1, 1))
    memory.block("state", 0)[:] = 1.0
    batch = StateBatch.build(batch.query_start, [0] * len(steps), batch.write_blocks)
    zeros = torch.zeros(len(steps), 1, 1)
    _native(
        kernels,
        lambda: selective_scan(
            zeros, steps, -torch.ones(1), zeros, zeros, torch.zeros(1), state_cache(memory, batch), "state"
        ),
        "scan_step",
    )
    kept = torch.stack([memory.block("state", block).flatten() for block in batch.write_blocks])
    torch.testing.assert_close(kept.double(), (-steps.double()).exp(), atol=0.0, rtol=4e-7)


def _others() -> Sequence[tuple[str, Callable[[], Tensor]]]:
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    memory, batch = _decode_batch(2, 1, (8, 3))
    shared = StateBatch.build([0, 1, 2], [batch.write_blocks[1], 0], batch.write_blocks)
    exporting = StateBatch.build([0, 1, 2], [0, 0], [1, 2], [(0, 1, 3)])
    longer = StateBatch.build([0, 2], [0], [1])
    taps = torch.randn(8, 4)

    def conv(step: StateBatch) -> Tensor:
        return causal_conv(x, taps, None, state_cache(memory, step), "state")

    return [
        ("bfloat16", lambda: linear(x.bfloat16(), weight.bfloat16())),
        ("float64", lambda: linear(x.double(), weight.double())),
        ("columns apart", lambda: linear(torch.randn(2, 16)[:, ::2], weight)),
        ("transposed weight", lambda: linear(x, torch.randn(8, 4).T)),
        ("many rows", lambda: linear(torch.randn(100, 8), weight)),
        ("weight of another dtype", lambda: rms_norm(x, torch.randn(8).bfloat16(), 1e-6, wide=True)),
        ("a row reads what another writes", lambda: conv(shared)),
        ("exports", lambda: conv(exporting)),
        ("several tokens", lambda: conv(longer)),
    ]


@pytest.mark.parametrize(("reason", "work"), [pytest.param(*other, id=other[0]) for other in _others()])
def test_torch_runs_where_a_kernel_is_not_for(reason: str, work: Callable[[], Tensor], kernels: Kernels) -> None:
    assert _native(kernels, work).numel(), reason


def test_torch_runs_outside_of_a_step(kernels: Kernels) -> None:
    spy: Any = Spy(kernels)
    with kernels_in_use(spy), kernels_in_use(None):
        linear(torch.randn(1, 8), torch.randn(4, 8))
    linear(torch.randn(1, 8), torch.randn(4, 8))
    assert spy.called == []
