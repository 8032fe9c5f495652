"""The memory of one rank of the fake worker: integer cells, masked with a number of the ranks that have the same bytes.

A cell that was never written, or poisoned, is known; a cell that another rank wrote reads as another number.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dalsegno.kv.layout import MemoryLayout
from dalsegno.types import NULL_BLOCK

__all__ = ["POISON", "RankMemory", "rank_mask"]

POISON = -1
"""What a cell reads as that must not be read."""


def rank_mask(rank: int, group: int, put_step: int) -> int:
    """The mask of a group's cells on a rank, if `put_step` neighbouring ranks have the same bytes; 0 on the first."""
    first = rank - rank % put_step
    return (first * 0x9E3779B97F4A7C15 + first * group * 0xC2B2AE3D27D4EB4F) & ((1 << 62) - 1)


class RankMemory:
    """A `BlockMemory` of integers.

    Attributes:
        memory: the integers as bytes.
    """

    path = None

    def __init__(self, layout: MemoryLayout, masks: Mapping[int, int]) -> None:
        """Poison everything; `masks` are those of the groups, at least 0."""
        widths = {group.group_id: 1 if group.is_state else group.block_size for group in layout.groups}
        counts = {group.group_id: layout.num_slabs * group.blocks_per_slab for group in layout.groups}
        flat = np.full(sum(counts[group] * widths[group] for group in widths), POISON, dtype=np.int64)
        self.memory = flat.data.cast("B")
        self._masks = masks
        self._cells: dict[int, npt.NDArray[np.int64]] = {}
        self._begin: dict[int, int] = {}
        begin = 0
        for group, width in widths.items():
            end = begin + counts[group] * width
            self._begin[group] = begin
            self._cells[group] = flat[begin:end].reshape(-1, width)
            begin = end

    def spans(self, group_id: int, block: int, num_tokens: int) -> list[tuple[int, int]]:
        """Return where a block's first cells lie, see `BlockMemory`."""
        width = self._cells[group_id].shape[1]
        return [(8 * (self._begin[group_id] + block * width), 8 * min(num_tokens, width))]

    def read(self, group: int, block: int, index: int = 0) -> int:
        """Return a cell, or `POISON`."""
        cell = int(self._cells[group][block, index])
        return cell if cell == POISON else cell ^ self._masks[group]

    def write(self, group: int, block: int, index: int, cell: int) -> None:
        """Set a cell."""
        self._cells[group][block, index] = cell ^ self._masks[group]

    def copy(self, group: int, source: int, target: int, num_tokens: int) -> None:
        """Copy a block's first cells to another block."""
        cells = self._cells[group]
        cells[target, :num_tokens] = cells[source, :num_tokens]

    def poison(self, group: int, blocks: Sequence[int]) -> None:
        """Make reads of these blocks fail until they are written again."""
        assert NULL_BLOCK not in blocks, "the null block is poisoned"
        self._cells[group][list(blocks)] = POISON

    def cells(self, group: int, block: int) -> list[int]:
        """Return all cells of a block."""
        return [self.read(group, block, index) for index in range(self._cells[group].shape[1])]
