"""Index tensors of paged groups against positions counted one by one."""

import random

import pytest
import torch

from dalsegno.ops.paged_batch import Gather, PagedBatch
from dalsegno.ops.views import PagedView, RowStrides
from tests.ops.memory import BlockDealer, SlabMemory, offsets_of


def _row(table: list[int], position: int, block_size: int, per_slab: int, strides: RowStrides) -> int:
    block = table[position // block_size]
    return block // per_slab * strides.slab + block % per_slab * strides.block + position % block_size * strides.token


def _random_step(
    seed: int, block_size: int, per_slab: int, window: int | None
) -> tuple[PagedBatch, RowStrides, list[int], list[int], list[list[int]]]:
    rng = random.Random(seed)
    lengths = [rng.choice([1, 1, 1, 2, 17, 40]) for _ in range(rng.randint(1, 12))]
    starts = [rng.choice([0, 1, 15, 16, 100]) for _ in lengths]
    memory = SlabMemory({"key": (block_size, 1, 2), "value": (block_size, 1, 2)}, 1200 // per_slab, per_slab)
    dealer = BlockDealer(memory, seed)
    tables = [dealer.take(-(-(s + n) // block_size)) for s, n in zip(starts, lengths, strict=True)]
    view = PagedView(memory.part("key"), memory.part("value"))
    batch = PagedBatch.build(offsets_of(lengths), starts, tables, block_size, per_slab, window)
    return batch, view.key_strides, lengths, starts, tables


@pytest.mark.parametrize("window", [None, 1, 24])
@pytest.mark.parametrize(("block_size", "per_slab"), [(4, 1), (16, 5), (64, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_rows_are_those_of_the_positions_each_token_sees(
    seed: int, block_size: int, per_slab: int, window: int | None
) -> None:
    batch, strides, lengths, starts, tables = _random_step(seed, block_size, per_slab, window)

    def rows(request: int, first: int, end: int) -> list[int]:
        return [_row(tables[request], p, block_size, per_slab, strides) for p in range(first, end)]

    def check(gather: Gather, index: int, request: int) -> None:
        first = max(0, starts[request] - window + 1) if window else 0
        expected = rows(request, first, starts[request] + lengths[request])
        given = gather.rows(strides).view(-1, gather.width)[index].tolist()
        assert given == expected + [0] * (gather.width - len(expected))

    written = [row for r, (s, n) in enumerate(zip(starts, lengths, strict=True)) for row in rows(r, s, s + n)]
    assert batch.write_rows(strides).tolist() == written
    offsets = offsets_of(lengths)
    seen: list[int] = []
    for decode in batch.decodes:
        for index, token in enumerate(decode.tokens.tolist()):
            seen.append(offsets.index(token))
            check(decode.gather, index, seen[-1])
            if decode.mask is not None:
                assert torch.equal(decode.mask[index, 0, 0], decode.gather.valid[index])
    for prefill in batch.prefills:
        seen.append(offsets.index(prefill.begin))
        check(prefill.gather, 0, seen[-1])
        first = max(0, starts[seen[-1]] - window + 1) if window else 0
        assert (prefill.end - prefill.begin, prefill.offset) == (lengths[seen[-1]], starts[seen[-1]] - first)
    assert sorted(seen) == list(range(len(lengths)))


def test_a_gather_of_decodes_is_mostly_tokens_and_bounded() -> None:
    starts = [7, 8000, 30, 29, 31, 4000, 3500, 9000, *[20] * 600]
    tables = [[1 + i for i in range(-(-(s + 1) // 16))] for s in starts]
    batch = PagedBatch.build(offsets_of([1] * len(starts)), starts, tables, 16, 1)
    for decode in batch.decodes:
        places = len(decode.tokens) * decode.gather.width
        assert int(decode.gather.lengths.sum()) >= 0.7 * places
        assert len(decode.tokens) == 1 or places <= 8192
        assert decode.tokens.tolist() == sorted(decode.tokens.tolist())
    assert sorted(t for d in batch.decodes for t in d.tokens.tolist()) == list(range(len(starts)))
    assert len(batch.decodes) < 12


def test_contexts_of_one_length_need_no_mask() -> None:
    batch = PagedBatch.build([0, 1, 2], [9, 9], [[1], [2]], 16, 1)
    assert [decode.mask for decode in batch.decodes] == [None]


def test_tables_are_copied() -> None:
    table = [3, 4]
    batch = PagedBatch.build([0, 2], [3], [table], 4, 1)
    table[0] = 9
    assert batch.write_rows(RowStrides(8, 8, 2)).tolist() == [3 * 8 + 3 * 2, 4 * 8]


@pytest.mark.parametrize(
    ("starts", "tables", "message"),
    [([3], [[3, 0]], "null block"), ([3], [[3]], "1 blocks for 2"), ([3, 4], [[3, 4]], "one start per request")],
)
def test_broken_tables_are_refused(starts: list[int], tables: list[list[int]], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        PagedBatch.build([0, 2], starts, tables, 4, 1)


def test_a_request_without_tokens_is_refused() -> None:
    with pytest.raises(AssertionError, match="at least one token"):
        PagedBatch.build([0, 2, 2], [0, 0], [[1], [2]], 4, 1)
