"""Index tensors of one step for paged groups: slots to write, rows to gather.

Padded gathers go through row 0, which is the null block's and reads as zeros; no other byte that a request has not
written is ever read. Entries of a block table left of a window may be the null block and are not read either.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dalsegno.ops.views import RowStrides

__all__ = ["DecodeGather", "PagedBatch", "PrefillGather"]

# A gather of decode rows is padded to its longest context: rows share one while this share of it is not padding.
_LEAST_FILL = 0.7


@dataclass(slots=True)
class _Gather:
    """Rows of a rectangular set of contexts; position of column 0 of row i is `base[i]`."""

    block_ids: Tensor
    base: Tensor
    first: Tensor
    end: Tensor
    width: int
    block_size: int
    blocks_per_slab: int
    cache: dict[RowStrides, Tensor] = field(default_factory=dict, repr=False)

    @property
    def valid(self) -> Tensor:
        """`[R, width]` bool: columns that are tokens of the row's context."""
        position = self.base[:, None] + torch.arange(self.width, device=self.base.device)
        return (position >= self.first[:, None]) & (position < self.end[:, None])

    def rows(self, strides: RowStrides) -> Tensor:
        """`[R * width]` int64 row numbers, 0 (the null block) where not valid; made once per step and stride set."""
        if strides not in self.cache:
            block_rows = strides.first_rows(self.block_ids, self.blocks_per_slab)
            offsets = torch.arange(self.block_size, device=block_rows.device) * strides.token
            rows = (block_rows[:, :, None] + offsets).flatten(1)[:, : self.width]
            self.cache[strides] = torch.where(self.valid, rows, 0).flatten()
        return self.cache[strides]


@dataclass(slots=True)
class DecodeGather:
    """Requests with one token this step and contexts of similar length.

    Attributes:
        tokens: `[R]` int64, the requests' tokens among the step's.
        gather: contexts, one row per request, padded to `gather.width`.
        mask: `[R, 1, 1, width]` bool, True where a column is a token of the context.
    """

    tokens: Tensor
    gather: _Gather
    mask: Tensor


@dataclass(slots=True)
class PrefillGather:
    """One request with several tokens: the step's tokens `[begin, end)`, at positions `start` and on.

    `gather` covers positions `[base, start + end - begin)`, from the first position that any of the tokens sees.
    """

    begin: int
    end: int
    start: int
    base: int
    gather: _Gather


@dataclass(slots=True)
class PagedBatch:
    """One step of a paged group.

    Attributes:
        query_start: R + 1 token offsets of the requests.
        starts: tokens each request had computed before this step.
        block_tables: per request, block ids up to its last token; copies.
        block_size: tokens per block.
        blocks_per_slab: blocks per slab.
        window: how many tokens a token sees, itself included; None sees all.
        decodes: requests with one token, grouped by context length.
        prefills: the others, one by one.
    """

    query_start: list[int]
    starts: list[int]
    block_tables: list[np.ndarray]
    block_size: int
    blocks_per_slab: int
    window: int | None
    decodes: list[DecodeGather]
    prefills: list[PrefillGather]
    _block_ids: Tensor
    _offsets: Tensor
    _write_rows: dict[RowStrides, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def build(
        cls,
        query_start: Sequence[int],
        starts: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        blocks_per_slab: int,
        window: int | None = None,
        device: torch.device | str | None = None,
    ) -> "PagedBatch":
        """Make the index tensors of one step.

        Args:
            query_start: R + 1 token offsets; every request has at least one token.
            starts: R counts of tokens computed before this step.
            block_tables: per request, logical block index to block id; copied, not kept. Blocks that no token of the
                step sees may be 0 (null).
            block_size: tokens per block.
            blocks_per_slab: blocks per slab.
            window: tokens a token sees, itself included; None sees all.
            device: where the index tensors live.
        """
        begins, ends, contexts = _ranges(query_start, starts)
        tables = [
            _read_table(table, -(-int(end) // block_size)) for table, end in zip(block_tables, contexts, strict=True)
        ]
        first = np.maximum(np.asarray(starts, dtype=np.int64) - window + 1, 0) if window else np.zeros_like(contexts)
        make = _GatherMaker(tables, first, contexts, block_size, blocks_per_slab, device)
        block_ids, offsets = _slots(tables, ends - begins, starts, block_size)
        single = np.flatnonzero(ends - begins == 1)
        return cls(
            query_start=[int(i) for i in query_start],
            starts=[int(i) for i in starts],
            block_tables=tables,
            block_size=block_size,
            blocks_per_slab=blocks_per_slab,
            window=window,
            decodes=[make.decode(begins, rows) for rows in _similar(single, make.widths)],
            prefills=[make.prefill(begins, ends, starts, int(row)) for row in np.flatnonzero(ends - begins > 1)],
            _block_ids=torch.from_numpy(block_ids).to(device),
            _offsets=torch.from_numpy(offsets).to(device),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return self.query_start[-1]

    def write_rows(self, strides: RowStrides) -> Tensor:
        """Return `[T]` int64: the row of each token's slot."""
        if strides not in self._write_rows:
            first_rows = strides.first_rows(self._block_ids, self.blocks_per_slab)
            self._write_rows[strides] = first_rows + self._offsets * strides.token
        return self._write_rows[strides]


class _GatherMaker:
    """Cuts block tables to what the step's tokens see."""

    def __init__(
        self,
        tables: list[np.ndarray],
        first: np.ndarray,
        end: np.ndarray,
        block_size: int,
        blocks_per_slab: int,
        device: torch.device | str | None,
    ) -> None:
        self.tables, self.first, self.end = tables, first, end
        self.block_size, self.blocks_per_slab, self.device = block_size, blocks_per_slab, device
        self.base = first // block_size * block_size
        self.widths = end - self.base

    def decode(self, begins: np.ndarray, rows: np.ndarray) -> DecodeGather:
        gather = self._gather(rows)
        return DecodeGather(torch.from_numpy(begins[rows]).to(self.device), gather, gather.valid[:, None, None, :])

    def prefill(self, begins: np.ndarray, ends: np.ndarray, starts: Sequence[int], row: int) -> PrefillGather:
        gather = self._gather(np.array([row]))
        return PrefillGather(int(begins[row]), int(ends[row]), int(starts[row]), int(self.base[row]), gather)

    def _gather(self, rows: np.ndarray) -> _Gather:
        width = int(self.widths[rows].max())
        block_ids = np.zeros((len(rows), -(-width // self.block_size)), dtype=np.int64)
        for i, row in enumerate(rows):
            seen = self.tables[row][self.base[row] // self.block_size :]
            block_ids[i, : len(seen)] = seen
        return _Gather(
            block_ids=torch.from_numpy(block_ids).to(self.device),
            base=torch.from_numpy(self.base[rows]).to(self.device),
            first=torch.from_numpy(self.first[rows]).to(self.device),
            end=torch.from_numpy(self.end[rows]).to(self.device),
            width=width,
            block_size=self.block_size,
            blocks_per_slab=self.blocks_per_slab,
        )


def _ranges(query_start: Sequence[int], starts: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    offsets = np.asarray(query_start, dtype=np.int64)
    begins, ends = offsets[:-1], offsets[1:]
    assert len(begins) == len(starts), "one start per request"
    assert bool(np.all(ends > begins)), "every request of a step has at least one token"
    return begins, ends, np.asarray(starts, dtype=np.int64) + ends - begins


def _read_table(table: Sequence[int], num_blocks: int) -> np.ndarray:
    assert len(table) >= num_blocks, f"a block table of {len(table)} blocks for {num_blocks} blocks of tokens"
    return np.asarray(table[:num_blocks], dtype=np.int64)


def _slots(
    tables: list[np.ndarray], lengths: np.ndarray, starts: Sequence[int], block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return block id and offset in the block of every token of the step, `[T]` each."""
    positions = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    block_ids = np.concatenate([table[pos // block_size] for table, pos in zip(tables, positions, strict=True)])
    assert bool(np.all(block_ids > 0)), "the null block is never written"
    return block_ids, np.concatenate(positions) % block_size


def _similar(rows: np.ndarray, widths: np.ndarray) -> list[np.ndarray]:
    """Split `rows` into groups whose contexts can be padded to one width at little waste."""
    groups: list[np.ndarray] = []
    order = rows[np.argsort(-widths[rows], kind="stable")]
    begin, total = 0, 0
    for i, row in enumerate(order):
        if i > begin and total + widths[row] < _LEAST_FILL * widths[order[begin]] * (i - begin + 1):
            groups.append(order[begin:i])
            begin, total = i, 0
        total += int(widths[row])
    if len(order):
        groups.append(order[begin:])
    return groups
