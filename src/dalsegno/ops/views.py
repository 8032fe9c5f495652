"""Views of slab memory, one per layer: where a block's bytes are.

Block `id` of a group with k blocks per slab is block `id % k` of slab `id // k`, so a layer's part is a strided view
`[num_slabs, k, ...]`. Ops address it through `rows`: the same memory seen as rows of one token (paged) or one state,
and `RowStrides`, which turns block ids into row numbers. What is in the rows and who may write them is not decided
here. Row 0 is the null block's first row in every view.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["PagedView", "RowStrides", "StateView"]


@dataclass(frozen=True, slots=True)
class RowStrides:
    """Distance, in rows of a row view, from one slab, block or token to the next; hashable, so batches cache by it."""

    slab: int
    block: int
    token: int

    def first_rows(self, block_ids: Tensor, blocks_per_slab: int) -> Tensor:
        """Return the row at which each block of `block_ids` (int64, any shape) begins."""
        if blocks_per_slab == 1:
            return block_ids * self.slab
        if self.slab == blocks_per_slab * self.block:
            return block_ids * self.block
        slabs = torch.div(block_ids, blocks_per_slab, rounding_mode="floor")
        return slabs * self.slab + (block_ids - slabs * blocks_per_slab) * self.block


def _row_view(part: Tensor, tokens_per_block: int | None) -> tuple[Tensor, RowStrides]:
    """See `part` as overlapping rows: one token each, or one whole block each when `tokens_per_block` is None.

    Rows may overlap when strides are no multiples of a row (several layers and parts share a block); only rows that
    `RowStrides` names are read or written, and those never overlap.
    """
    num_slabs, blocks_per_slab = part.shape[:2]
    inner = part.shape[2:] if tokens_per_block is None else part.shape[3:]
    row = math.prod(inner)
    assert part[0, 0].is_contiguous(), "a part must be contiguous inside a block"
    strides = [row] if tokens_per_block is not None else []
    strides += [part.stride(0)] if num_slabs > 1 else []
    strides += [part.stride(1)] if blocks_per_slab > 1 else []
    unit = math.gcd(*strides) or row
    slab, block = part.stride(0) // unit, part.stride(1) // unit
    token = row // unit if tokens_per_block is not None else 0
    last = (num_slabs - 1) * slab + (blocks_per_slab - 1) * block + max(0, (tokens_per_block or 1) - 1) * token
    rows = torch.as_strided(part, (last + 1, row), (unit, 1), part.storage_offset())
    return rows, RowStrides(slab, block, token)


@dataclass(frozen=True, slots=True)
class PagedView:
    """One attention or window layer's keys and values.

    Attributes:
        key: `[num_slabs, blocks_per_slab, block_size, kv_heads, head_dim]`, strided over the first two dimensions.
        value: `[num_slabs, blocks_per_slab, block_size, kv_heads, value_dim]`, likewise.
        key_rows: `[rows, kv_heads * head_dim]`, the same memory by token.
        value_rows: `[rows, kv_heads * value_dim]`, likewise.
        key_strides: how to find a slot in `key_rows`.
        value_strides: how to find a slot in `value_rows`.
    """

    key: Tensor
    value: Tensor
    key_rows: Tensor = field(init=False, repr=False)
    value_rows: Tensor = field(init=False, repr=False)
    key_strides: RowStrides = field(init=False, repr=False)
    value_strides: RowStrides = field(init=False, repr=False)

    def __post_init__(self) -> None:
        assert self.key.shape[:4] == self.value.shape[:4], "keys and values must share slabs, blocks, tokens and heads"
        for name in ("key", "value"):
            rows, strides = _row_view(getattr(self, name), self.block_size)
            object.__setattr__(self, f"{name}_rows", rows)
            object.__setattr__(self, f"{name}_strides", strides)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.key.shape[2]

    @property
    def blocks_per_slab(self) -> int:
        """Blocks per slab (k)."""
        return self.key.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Heads per token of keys and values."""
        return self.key.shape[3]


@dataclass(frozen=True, slots=True)
class StateView:
    """One state layer's parts by name, each `[num_slabs, blocks_per_slab, *shape]`, strided over the first two.

    `rows[name]` is the same memory `[rows, prod(shape)]`, and `strides[name]` finds a block in it.
    """

    parts: dict[str, Tensor]
    rows: dict[str, Tensor] = field(init=False, repr=False)
    strides: dict[str, RowStrides] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        views = {name: _row_view(part, None) for name, part in self.parts.items()}
        object.__setattr__(self, "rows", {name: rows for name, (rows, _) in views.items()})
        object.__setattr__(self, "strides", {name: strides for name, (_, strides) in views.items()})

    @property
    def blocks_per_slab(self) -> int:
        """Blocks per slab (k)."""
        return next(iter(self.parts.values())).shape[1]
