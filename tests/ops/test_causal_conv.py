"""The causal convolution against its reference: lengths, mixes, blocks, exports, splits, poison."""

import pytest
import torch
import torch.nn.functional as F

from dalsegno.ops.batch import StateBatch
from dalsegno.ops.causal_conv import causal_conv
from tests.ops.memory import NAN, SlabMemory, offsets_of, state_cache
from tests.ops.state_steps import (
    CHANNELS,
    KERNEL,
    SHAPES,
    ConvInputs,
    check_against_reference,
    in_place,
    random_cuts,
    random_state_step,
    run_conv,
)

pytestmark = pytest.mark.usefixtures("either_form")

MIXES = [[1], [2], [3], [4], [1, 1, 1], [1, 2, 3, 4, 5], [30, 1, 2, 30], [100]]


def _memory(num_blocks: int) -> SlabMemory:
    return SlabMemory(SHAPES, 1 + num_blocks, 1)


@pytest.mark.parametrize("per_slab", [1, 5])
@pytest.mark.parametrize(("bias", "activation"), [(True, "silu"), (False, None)])
@pytest.mark.parametrize("lengths", MIXES, ids=str)
def test_mixed_steps_match_the_reference(lengths: list[int], bias: bool, activation: str | None, per_slab: int) -> None:
    for seed in range(3):
        memory, batch = random_state_step(lengths, per_slab, seed)
        inputs = ConvInputs.random(sum(lengths), seed, bias=bias, activation=activation)
        check_against_reference(inputs, memory, batch)


def test_a_prompt_from_nothing_is_a_padded_convolution() -> None:
    inputs = ConvInputs.random(20, activation=None)
    memory = _memory(1)
    out = run_conv(inputs, memory, in_place(memory, 20, 1, fresh=True))
    padded = F.pad(inputs.x.t(), (KERNEL - 1, 0))[None]
    expected = F.conv1d(padded, inputs.weight[:, None], inputs.bias, groups=CHANNELS)[0].t()
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(memory.block("conv", 1), inputs.x[-KERNEL + 1 :].t())


def test_an_export_is_the_window_of_a_run_that_ended_there() -> None:
    length = 300
    inputs = ConvInputs.random(length)
    memory = _memory(2 + length)
    memory.block("conv", 1).normal_()
    window = memory.block("conv", 1).clone()
    exports = [(0, count, 2 + count) for count in range(1, length + 1)]
    run_conv(inputs, memory, StateBatch.build([0, length], [1], [2], exports))
    history = torch.cat([window, inputs.x.t()], dim=1)
    for count in range(1, length + 1):
        assert torch.equal(memory.block("conv", 2 + count), history[:, count : count + KERNEL - 1])
    assert torch.equal(memory.block("conv", 1), window)


@pytest.mark.parametrize("seed", range(6))
def test_any_split_over_steps_gives_the_same(seed: int) -> None:
    length = 25
    inputs = ConvInputs.random(length, seed)
    memory = _memory(2)
    whole = run_conv(inputs, memory, in_place(memory, length, 1, fresh=True))
    parts = [
        run_conv(inputs.part(begin, end), memory, in_place(memory, end - begin, 2, fresh=begin == 0))
        for begin, end in random_cuts(length, seed)
    ]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-6, rtol=1e-6)
    assert torch.equal(memory.block("conv", 2), memory.block("conv", 1))


def test_every_read_comes_before_any_write() -> None:
    memory = _memory(2)
    for block in (1, 2):
        memory.block("conv", block).normal_()
    check_against_reference(ConvInputs.random(3), memory, StateBatch.build([0, 1, 3], [1, 2], [2, 1]))


@pytest.mark.parametrize("broken", range(3))
def test_a_request_with_nan_inputs_spoils_no_other(broken: int) -> None:
    offsets = offsets_of([1, 40, 3])
    inputs = ConvInputs.random(44)
    batch = StateBatch.build(offsets, [0] * 3, [1, 2, 3])
    expected = run_conv(inputs, _memory(3), batch)
    inputs.x[offsets[broken] : offsets[broken + 1]] = NAN
    memory = _memory(3)
    out = run_conv(inputs, memory, batch)
    for row in {0, 1, 2} - {broken}:
        tokens = slice(offsets[row], offsets[row + 1])
        assert torch.equal(out[tokens], expected[tokens])
        assert bool(memory.block("conv", row + 1).isfinite().all())


@pytest.mark.parametrize("kernel", [2, 3, 7])
def test_kernels_of_other_sizes(kernel: int) -> None:
    memory = SlabMemory({"conv": (CHANNELS, kernel - 1)}, 3, 1)
    x, weight = torch.randn(9, CHANNELS), torch.randn(CHANNELS, kernel)
    cache = state_cache(memory, StateBatch.build([0, 9], [0], [1]))
    out = causal_conv(x, weight, None, cache, activation=None)
    padded = F.pad(x.t(), (kernel - 1, 0))
    torch.testing.assert_close(out, F.conv1d(padded[None], weight[:, None], groups=CHANNELS)[0].t())
    assert torch.equal(memory.block("conv", 1), padded[:, -kernel + 1 :])


def test_low_precision_rounds_once() -> None:
    memory = SlabMemory(SHAPES, 2, 1, dtype=torch.bfloat16)
    inputs = ConvInputs.random(10)
    inputs.x = inputs.x.bfloat16()
    out = run_conv(inputs, memory, in_place(memory, 10, 1, fresh=True))
    exact = ConvInputs(inputs.x.float(), inputs.weight, inputs.bias, inputs.activation)
    full = _memory(1)
    torch.testing.assert_close(out, run_conv(exact, full, in_place(full, 10, 1, fresh=True)).bfloat16())
    assert torch.equal(memory.block("conv", 1), inputs.x[-KERNEL + 1 :].t())


def test_an_unknown_activation_is_refused() -> None:
    memory = _memory(1)
    inputs = ConvInputs.random(2, activation="relu")
    with pytest.raises(AssertionError, match="'relu'"):
        run_conv(inputs, memory, in_place(memory, 2, 1, fresh=True))
