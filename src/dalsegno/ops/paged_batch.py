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

__all__ = ["DecodeGather", "Gather", "PagedBatch", "PrefillGather"]

# A gather of decode rows is padded to its longest context: rows share one while this share of it is not padding.
_LEAST_FILL = 0.7
# Rows of a gather, so that it stays in the processor's cache (a context longer than this is gathered alone).
_MOST_TOKENS = 8192


@dataclass(slots=True)
class Gather:
    """Contexts of R requests, padded to one width; a context is the positions that the step's tokens see.

    Attributes:
        block_ids: `[R, blocks]` int64, blocks from the one that holds the context's first token; 0 at paddings.
        skip: `[R, 1]` int64, tokens of the first block that are left of the context; None if there are none.
        lengths: `[R]` int64, tokens of each context.
        width: tokens of the longest context.
    """

    block_ids: Tensor
    skip: Tensor | None
    lengths: Tensor
    width: int
    block_size: int
    blocks_per_slab: int
    _rows: dict[RowStrides, Tensor] = field(default_factory=dict, repr=False)

    @property
    def valid(self) -> Tensor:
        """`[R, width]` bool: columns that are tokens of the context."""
        return torch.arange(self.width, device=self.lengths.device) < self.lengths[:, None]

    def rows(self, strides: RowStrides) -> Tensor:
        """Return `[R * width]` int64 row numbers, 0 (the null block) where not valid; made once per step."""
        if strides not in self._rows:
            offsets = torch.arange(self.block_size, device=self.block_ids.device) * strides.token
            rows = (strides.first_rows(self.block_ids, self.blocks_per_slab)[:, :, None] + offsets).flatten(1)
            if self.skip is not None:
                columns = self.skip + torch.arange(self.width, device=rows.device)
                rows = rows.gather(1, columns.clamp_(max=rows.shape[1] - 1))
            self._rows[strides] = torch.where(self.valid, rows[:, : self.width], 0).flatten()
        return self._rows[strides]


@dataclass(slots=True)
class DecodeGather:
    """Requests with one token this step and contexts of similar length.

    Attributes:
        tokens: `[R]` int64, the requests' tokens among the step's, ascending.
        gather: their contexts.
        mask: `[R, 1, 1, width]` bool, True where a column is a token of the context; None when all are.
    """

    tokens: Tensor
    gather: Gather
    mask: Tensor | None


@dataclass(slots=True)
class PrefillGather:
    """One request with several tokens, `[begin, end)` among the step's.

    Attributes:
        begin: its first token.
        end: behind its last token.
        offset: column of its first token in the context, which reaches to its last.
        gather: the context.
    """

    begin: int
    end: int
    offset: int
    gather: Gather


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
        computed = np.asarray(starts, dtype=np.int64)
        first = np.maximum(computed - window + 1, 0) if window else np.zeros_like(computed)
        gathers = _Gathers(tables, first, contexts - first, block_size, blocks_per_slab, device)
        block_ids, offsets = _slots(tables, ends - begins, starts, block_size)
        single = np.flatnonzero(ends - begins == 1)
        several = np.flatnonzero(ends - begins > 1)
        return cls(
            query_start=[int(i) for i in query_start],
            starts=[int(i) for i in starts],
            block_tables=tables,
            block_size=block_size,
            blocks_per_slab=blocks_per_slab,
            window=window,
            decodes=[gathers.decode(rows, begins[rows]) for rows in _similar(single, contexts - first)],
            prefills=[
                PrefillGather(int(begins[i]), int(ends[i]), int(computed[i] - first[i]), gathers.make(np.array([i])))
                for i in several
            ],
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


@dataclass(slots=True)
class _Gathers:
    """Cuts block tables to the contexts that begin at `first` and have `lengths` tokens."""

    tables: list[np.ndarray]
    first: np.ndarray
    lengths: np.ndarray
    block_size: int
    blocks_per_slab: int
    device: torch.device | str | None

    def decode(self, rows: np.ndarray, tokens: np.ndarray) -> DecodeGather:
        gather = self.make(rows)
        even = bool(np.all(self.lengths[rows] == gather.width))
        return DecodeGather(self._move(tokens), gather, None if even else gather.valid[:, None, None, :])

    def make(self, rows: np.ndarray) -> Gather:
        seen = [self.tables[row][self.first[row] // self.block_size :] for row in rows]
        block_ids = np.zeros((len(rows), max(len(blocks) for blocks in seen)), dtype=np.int64)
        for ids, blocks in zip(block_ids, seen, strict=True):
            ids[: len(blocks)] = blocks
        skip = self.first[rows] % self.block_size
        return Gather(
            block_ids=self._move(block_ids),
            skip=self._move(skip[:, None]) if skip.any() else None,
            lengths=self._move(self.lengths[rows]),
            width=int(self.lengths[rows].max()),
            block_size=self.block_size,
            blocks_per_slab=self.blocks_per_slab,
        )

    def _move(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)


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


def _similar(rows: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Split `rows` into groups whose contexts can be padded to one width at little waste; each group ascends."""
    groups: list[list[int]] = []
    total = 0
    for row in rows[np.argsort(-lengths[rows], kind="stable")]:
        total += lengths[row]
        padded = lengths[groups[-1][0]] * (len(groups[-1]) + 1) if groups else 0
        if not groups or total < _LEAST_FILL * padded or padded > _MOST_TOKENS:
            groups.append([])
            total = lengths[row]
        groups[-1].append(row)
    return [np.sort(np.asarray(group)) for group in groups]
