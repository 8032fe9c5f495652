"""Index tensors of one step for the state group: blocks to read and write, single tokens, tiles, exports.

Every read of a step happens before any write. After an op the write block of a request holds the state after all its
tokens of the step, and each export block the state after its first `num_tokens` tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dalsegno.ops.tiles import TileGrid, build_tile_grid
from dalsegno.ops.views import RowStrides

__all__ = ["StateBatch", "WindowPlaces"]


@dataclass(frozen=True, slots=True)
class WindowPlaces:
    """Places in a layout that has, request by request, a window of w earlier inputs and then the step's inputs.

    Attributes:
        outputs: `[T]` int64, where the w + 1 inputs that end at each token begin; None when that is token after token.
        kept: `[(R + E) * w]` int64, the w inputs before each boundary that is written, in the order of `written`.
    """

    outputs: Tensor | None
    kept: Tensor


@dataclass(slots=True)
class StateBatch:
    """One step of the state group.

    Attributes:
        query_start: R + 1 token offsets of the requests.
        read_blocks: block each request's state is read from; the null block reads as zeros.
        write_blocks: block each request's state after the step is written to; may equal its read block.
        exports: `(request row, num_tokens, block)`: the state after the row's first `num_tokens` (1 to all) goes
            into `block`.
        blocks_per_slab: blocks per slab.
        written: write order of ops, the R write blocks and then the export blocks, `[R + E]` int64.
        single_rows: `[R1]` int64, requests with one token this step.
        single_tokens: `[R1]` int64, those tokens.
        single_exports: `[X]` int64 numbers of exports of such requests.
        single_export_rows: `[X]` int64, for each of them its index in `single_rows`.
        tiles: the other requests cut into tiles; None if there is none.
    """

    query_start: list[int]
    read_blocks: list[int]
    write_blocks: list[int]
    exports: list[tuple[int, int, int]]
    blocks_per_slab: int
    read: Tensor
    written: Tensor
    single_rows: Tensor
    single_tokens: Tensor
    single_exports: Tensor
    single_export_rows: Tensor
    tiles: TileGrid | None
    device: torch.device
    _rows: dict[tuple[str, RowStrides], Tensor] = field(default_factory=dict, repr=False)
    _places: dict[int, WindowPlaces] = field(default_factory=dict, repr=False)
    _rows_are_apart: bool | None = field(default=None, repr=False)

    @classmethod
    def build(
        cls,
        query_start: Sequence[int],
        read_blocks: Sequence[int],
        write_blocks: Sequence[int],
        exports: Sequence[tuple[int, int, int]] = (),
        blocks_per_slab: int = 1,
        device: torch.device | str | None = None,
    ) -> "StateBatch":
        """Make the index tensors of one step; see the attributes for the arguments, `device` holds the tensors."""
        offsets = np.asarray(query_start, dtype=np.int64)
        lengths = np.diff(offsets)
        assert len(read_blocks) == len(write_blocks) == len(lengths), "one read and one write block per request"
        assert bool(np.all(lengths > 0)), "every request of a step has at least one token"
        assert all(1 <= count <= lengths[row] for row, count, _ in exports), "an export lies inside the step's tokens"
        written = [*write_blocks, *(block for _, _, block in exports)]
        assert 0 not in written, "the null block is never written"
        assert len(set(written)) == len(written), "a block is written once per step"
        single = np.flatnonzero(lengths == 1)
        rank = {int(row): i for i, row in enumerate(single)}
        of_single = [(number, rank[row]) for number, (row, _, _) in enumerate(exports) if row in rank]
        to = _Mover(device)
        return cls(
            query_start=offsets.tolist(),
            read_blocks=[int(i) for i in read_blocks],
            write_blocks=[int(i) for i in write_blocks],
            exports=[(int(row), int(count), int(block)) for row, count, block in exports],
            blocks_per_slab=blocks_per_slab,
            read=to(read_blocks),
            written=to(written),
            single_rows=to(single),
            single_tokens=to(offsets[single]),
            single_exports=to([number for number, _ in of_single]),
            single_export_rows=to([index for _, index in of_single]),
            tiles=build_tile_grid(offsets, exports, device) if len(single) < len(lengths) else None,
            device=torch.device(device or "cpu"),
        )

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request in the step."""
        return [end - begin for begin, end in zip(self.query_start, self.query_start[1:], strict=False)]

    @property
    def num_requests(self) -> int:
        """Requests of the step (R)."""
        return len(self.read_blocks)

    @property
    def rows_are_apart(self) -> bool:
        """Whether requests may be read and written one after the other: nobody reads what another one writes."""
        if self._rows_are_apart is None:
            writer = {block: row for row, block in enumerate(self.write_blocks)}
            self._rows_are_apart = not self.exports and all(
                writer.get(block, row) == row for row, block in enumerate(self.read_blocks)
            )
        return self._rows_are_apart

    def read_rows(self, strides: RowStrides) -> Tensor:
        """Return `[R]` int64: the row of each request's read block."""
        return self._block_rows("read", self.read, strides)

    def write_rows(self, strides: RowStrides) -> Tensor:
        """Return `[R + E]` int64: rows of the write blocks and then of the export blocks."""
        return self._block_rows("write", self.written, strides)

    def window_places(self, width: int) -> WindowPlaces:
        """Return places for windows of `width` inputs; made once per step."""
        if width not in self._places:
            ends = [*enumerate(self.lengths), *((row, count) for row, count, _ in self.exports)]
            first = np.asarray([self.query_start[row] + width * row + count for row, count in ends], dtype=np.int64)
            outputs = np.arange(self.query_start[-1]) + width * np.repeat(np.arange(self.num_requests), self.lengths)
            to = _Mover(self.device)
            kept = to((first[:, None] + np.arange(width)).ravel())
            self._places[width] = WindowPlaces(to(outputs) if self.num_requests > 1 else None, kept)
        return self._places[width]

    def _block_rows(self, name: str, block_ids: Tensor, strides: RowStrides) -> Tensor:
        key = (name, strides)
        if key not in self._rows:
            self._rows[key] = strides.first_rows(block_ids, self.blocks_per_slab)
        return self._rows[key]


class _Mover:
    """Makes int64 tensors on a device."""

    def __init__(self, device: torch.device | str | None) -> None:
        self.device = device

    def __call__(self, values: Sequence[int] | np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self.device)
