"""Paged attention against its reference: lengths, mixes, block sizes, windows, splits, poison."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dalsegno.ops import paged_attention as module
from dalsegno.ops import reference
from dalsegno.ops.batch import PagedBatch
from dalsegno.ops.paged_attention import paged_attention
from tests.ops.memory import NAN, BlockDealer, SlabMemory, offsets_of, paged_cache, same_memory
from tests.ops.state_steps import random_cuts

KV_HEADS, GROUP, DIM, VALUE_DIM = 2, 3, 8, 8
SCALE = 0.4


def _memory(block_size: int, per_slab: int, num_blocks: int, value_dim: int = VALUE_DIM, gap: int = 3) -> SlabMemory:
    shapes = {"key": (block_size, KV_HEADS, DIM), "value": (block_size, KV_HEADS, value_dim)}
    return SlabMemory(shapes, 1 + -(-num_blocks // per_slab), per_slab, gap)


def _inputs(num_tokens: int, seed: int = 0, value_dim: int = VALUE_DIM) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (
        2 * torch.randn(num_tokens, KV_HEADS * GROUP, DIM, generator=g),
        torch.randn(num_tokens, KV_HEADS, DIM, generator=g),
        torch.randn(num_tokens, KV_HEADS, value_dim, generator=g),
    )


def _fill_past(memory: SlabMemory, table: Sequence[int], first: int, end: int, block_size: int) -> None:
    """Write keys and values of the positions a step can see, and of no other."""
    for position in range(first, end):
        for name in memory.shapes:
            memory.block(name, table[position // block_size])[position % block_size].normal_()


def _step(
    lengths: Sequence[int],
    starts: Sequence[int],
    block_size: int,
    per_slab: int,
    window: int | None = None,
    value_dim: int = VALUE_DIM,
    seed: int = 0,
) -> tuple[SlabMemory, PagedBatch]:
    """Return memory with the requests' visible past, and a batch whose tables are null left of the window."""
    counts = [-(-(start + length) // block_size) for start, length in zip(starts, lengths, strict=True)]
    memory = _memory(block_size, per_slab, sum(counts), value_dim, gap=random.Random(seed).choice([0, 3]))
    dealer = BlockDealer(memory, seed)
    tables = [dealer.take(count) for count in counts]
    for table, start in zip(tables, starts, strict=True):
        first = max(0, start - window + 1) if window else 0
        table[: first // block_size] = [0] * (first // block_size)
        _fill_past(memory, table, first, start, block_size)
    return memory, PagedBatch.build(offsets_of(lengths), starts, tables, block_size, per_slab, window)


def _check(inputs: tuple[Tensor, Tensor, Tensor], memory: SlabMemory, batch: PagedBatch) -> Tensor:
    other = memory.clone()
    out = paged_attention(*inputs, paged_cache(memory, batch), SCALE)
    expected = reference.paged_attention(*inputs, paged_cache(other, batch), SCALE)
    assert bool(expected.isfinite().all()), "the reference itself read a poisoned byte"
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    same_memory(memory, other, tolerance=0.0)
    return out


STEPS: list[tuple[list[int], list[int]]] = [
    ([1], [0]),
    ([1], [15]),
    ([1], [16]),
    ([1, 1, 1], [3, 40, 100]),
    ([7], [0]),
    ([33], [31]),
    ([1, 20, 1, 2], [64, 0, 5, 63]),
    ([129, 1], [5, 130]),
]


@pytest.mark.parametrize("window", [None, 1, 7, 64])
@pytest.mark.parametrize(("block_size", "per_slab"), [(16, 1), (16, 6), (64, 1), (64, 3), (1024, 1), (1024, 2)])
@pytest.mark.parametrize(("lengths", "starts"), STEPS, ids=str)
def test_mixed_steps_match_the_reference(
    lengths: list[int], starts: list[int], block_size: int, per_slab: int, window: int | None
) -> None:
    _check(_inputs(sum(lengths)), *_step(lengths, starts, block_size, per_slab, window))


@pytest.mark.parametrize("window", [None, 20])
def test_values_may_be_wider_than_keys(window: int | None) -> None:
    memory, batch = _step([1, 20, 5], [30, 3, 17], 16, 2, window, value_dim=12)
    _check(_inputs(26, value_dim=12), memory, batch)


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("seed", range(4))
def test_any_split_over_steps_gives_the_same(seed: int, window: int | None) -> None:
    length, block_size = 140, 16
    query, key, value = _inputs(length, seed)
    outs = []
    for cuts in ([(0, length)], random_cuts(length, seed)):
        memory = _memory(block_size, 2, 9)
        table = BlockDealer(memory, seed).take(9)
        parts = []
        for begin, end in cuts:
            if window:
                gone = max(0, begin - window + 1) // block_size
                table[:gone] = [0] * gone
            batch = PagedBatch.build([0, end - begin], [begin], [table], block_size, 2, window)
            inputs = (query[begin:end], key[begin:end], value[begin:end])
            parts.append(paged_attention(*inputs, paged_cache(memory, batch), SCALE))
        outs.append(torch.cat(parts))
    torch.testing.assert_close(outs[1], outs[0], atol=1e-5, rtol=1e-5)


def test_a_shared_block_serves_prefixes_of_any_length() -> None:
    # Both requests read the first block; only the first has tokens behind position 10 in it.
    memory = _memory(16, 1, 4)
    shared, own, tail, _ = BlockDealer(memory, 0).take(4)
    _fill_past(memory, [shared], 0, 16, 16)
    for name in memory.shapes:
        memory.block(name, tail)[:10] = memory.block(name, shared)[:10]
    batch = PagedBatch.build([0, 1, 3], [16, 10], [[shared, own], [tail]], 16, 1)
    _check(_inputs(3), memory, batch)


def test_steps_of_one_request_match_plain_attention() -> None:
    length = 300
    query, key, value = _inputs(length)
    memory = _memory(16, 4, 19)
    table = BlockDealer(memory, 1).take(19)
    batch = PagedBatch.build([0, length], [0], [table], 16, 4)
    out = paged_attention(query, key, value, paged_cache(memory, batch), SCALE)
    expected = F.scaled_dot_product_attention(
        query.transpose(0, 1),
        key.transpose(0, 1).repeat_interleave(GROUP, dim=0),
        value.transpose(0, 1).repeat_interleave(GROUP, dim=0),
        is_causal=True,
        scale=SCALE,
    )
    torch.testing.assert_close(out, expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 50])
def test_scores_of_a_long_context_stay_bounded(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    masks: list[Tensor] = []
    attend = F.scaled_dot_product_attention

    def watch(*args: Any, **options: Any) -> Tensor:
        masks.append(options["attn_mask"])
        return attend(*args, **options)

    memory, batch = _step([90], [300], 16, 2, window)
    monkeypatch.setattr(module, "_MAX_SCORES", 4000)
    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    _check(_inputs(90), memory, batch)
    assert len(masks) > 3
    assert max(mask.numel() for mask in masks) <= 4000


@pytest.mark.parametrize("broken", range(4))
def test_a_request_with_nan_inputs_spoils_no_other(broken: int) -> None:
    lengths, starts = [1, 40, 1, 3], [20, 3, 25, 18]
    offsets = offsets_of(lengths)
    memory, batch = _step(lengths, starts, 16, 3)
    query, key, value = _inputs(sum(lengths))
    expected = paged_attention(query, key, value, paged_cache(memory.clone(), batch), SCALE)
    for x in (query, key, value):
        x[offsets[broken] : offsets[broken + 1]] = NAN
    out = paged_attention(query, key, value, paged_cache(memory, batch), SCALE)
    for row in set(range(4)) - {broken}:
        tokens = slice(offsets[row], offsets[row + 1])
        torch.testing.assert_close(out[tokens], expected[tokens], atol=1e-6, rtol=1e-6)


def test_many_decodes_of_unlike_lengths_match_one_by_one() -> None:
    rng = random.Random(3)
    starts = [rng.choice([1, 2, 30, 300, 301, 700]) for _ in range(40)]
    memory, batch = _step([1] * 40, starts, 16, 5)
    assert len(batch.decodes) > 1
    query, key, value = _inputs(40)
    together = paged_attention(query, key, value, paged_cache(memory, batch), SCALE)
    for row, start in enumerate(starts):
        alone = PagedBatch.build([0, 1], [start], [batch.block_tables[row].tolist()], 16, 5)
        token = slice(row, row + 1)
        out = paged_attention(query[token], key[token], value[token], paged_cache(memory, alone), SCALE)
        torch.testing.assert_close(together[token], out, atol=1e-6, rtol=1e-6)


def test_caches_of_low_precision_answer_in_the_precision_of_the_query() -> None:
    memory = SlabMemory({"key": (16, KV_HEADS, DIM), "value": (16, KV_HEADS, DIM)}, 5, 1, dtype=torch.bfloat16)
    batch = PagedBatch.build([0, 20, 21], [0, 3], [[1, 2], [3]], 16, 1)
    _fill_past(memory, [3], 0, 3, 16)
    out = _check(_inputs(21), memory, batch)
    assert out.dtype == torch.float32
