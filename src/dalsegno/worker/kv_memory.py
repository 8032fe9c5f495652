"""Device memory of the cache: one flat tensor of slabs, seen by each layer through its own view.

The null block is all zeros from the start and nothing here writes it. Which block belongs to whom is the pool's
affair; this module moves bytes where it is told.
"""

import mmap
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from dalsegno.connector.host_bytes import HostBytes
from dalsegno.errors import OptionError
from dalsegno.kv.layout import GroupSpec, MemoryLayout
from dalsegno.ops.views import PagedView, RowStrides, StateView
from dalsegno.types import NULL_BLOCK, BlockCopy, LayerCacheSpec

__all__ = ["KVMemory"]

_POISON_BYTE = 0xFF  # NaN in every floating-point format


class KVMemory:
    """The slabs of a layout on one device.

    Attributes:
        layout: how the memory is cut.
        memory: `[total_bytes]` uint8.
        views: view of each layer that keeps something, by layer.
    """

    def __init__(self, layout: MemoryLayout, device: torch.device | str, *, shared: bool = False) -> None:
        """Make the slabs; `shared` ones, which are the host's, can be opened by other processes of this user."""
        self.layout = layout
        self._file = os.memfd_create("dalsegno-kv", os.MFD_CLOEXEC) if shared else None
        self.memory = _zeros(layout.total_bytes, torch.device(device), self._file)
        self.views: dict[int, PagedView | StateView] = {}
        for group in layout.groups:
            for layer, offsets in zip(group.layers, group.part_offsets, strict=True):
                self.views[layer.layer] = self._view(group, layer, offsets)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the first tokens of blocks to other blocks, in order, in all layers of the group.

        Nothing of the target but those tokens is written. A block of the state group holds one state, not tokens, and
        is copied whole.
        """
        for run in _independent_runs(copies):
            by_group: dict[int, list[BlockCopy]] = defaultdict(list)
            for copy in run:
                by_group[copy.group_id].append(copy)
            for group_id, group_copies in by_group.items():
                self._copy_in_group(self.layout.groups[group_id], group_copies)

    def host_bytes(self) -> HostBytes:
        """Return the memory as a connector sees it.

        Raises:
            OptionError: it is not in the host's memory.
        """
        if self.memory.device.type != "cpu":
            raise OptionError(f"a KV connector needs device='cpu'; {self.memory.device} memory cannot be stored yet")
        path = None if self._file is None else f"/proc/{os.getpid()}/fd/{self._file}"
        return HostBytes(self.layout, memoryview(self.memory.numpy().data), path)

    def poison(self, group_id: int, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN, paddings included."""
        size = self.layout.groups[group_id].block_bytes
        for block_id in block_ids:
            assert block_id != NULL_BLOCK, "the null block is never written"
            begin = self.layout.address(group_id, block_id)
            self.memory[begin : begin + size].fill_(_POISON_BYTE)

    def close(self) -> None:
        """Give the memory back; nothing else is called afterwards."""
        self.views.clear()
        self.memory = self.memory.new_empty(0)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _view(self, group: GroupSpec, layer: LayerCacheSpec, offsets: tuple[int, ...]) -> PagedView | StateView:
        parts = {
            part.name: self._part(group, offset, part.shape, getattr(torch, part.dtype))
            for part, offset in zip(layer.parts, offsets, strict=True)
        }
        return StateView(parts) if group.is_state else PagedView(parts["key"], parts["value"])

    def _part(self, group: GroupSpec, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See one part of one layer as `[num_slabs, blocks_per_slab, (block_size,) *shape]`."""
        inner = shape if group.is_state else (group.block_size, *shape)
        typed = self.memory.view(dtype)
        strides = [self.layout.slab_bytes // dtype.itemsize, group.block_bytes // dtype.itemsize]
        return typed.as_strided(
            (self.layout.num_slabs, group.blocks_per_slab, *inner),
            (*strides, *torch.empty(inner, device="meta").stride()),
            offset // dtype.itemsize,
        )

    def _copy_in_group(self, group: GroupSpec, copies: list[BlockCopy]) -> None:
        counts = np.asarray([1 if group.is_state else copy.num_tokens for copy in copies])
        assert group.is_state or (counts.min() > 0 and counts.max() <= group.block_size), "a copy stays in its block"
        device = self.memory.device
        repeats = torch.from_numpy(counts).to(device)
        offsets = torch.from_numpy(np.concatenate([np.arange(count) for count in counts])).to(device)
        blocks = torch.tensor([(copy.source, copy.target) for copy in copies], device=device).repeat_interleave(
            repeats, dim=0
        )
        rows_of: dict[RowStrides, Tensor] = {}
        for layer in group.layers:
            for rows, strides in _rows(self.views[layer.layer]):
                if strides not in rows_of:
                    first = strides.first_rows(blocks, group.blocks_per_slab)
                    rows_of[strides] = first + offsets[:, None] * strides.token
                source, target = rows_of[strides].unbind(1)
                rows[target] = rows.index_select(0, source)


def _rows(view: PagedView | StateView) -> Iterator[tuple[Tensor, RowStrides]]:
    if isinstance(view, StateView):
        for name, rows in view.rows.items():
            yield rows, view.strides[name]
    else:
        yield view.key_rows, view.key_strides
        yield view.value_rows, view.value_strides


def _zeros(num_bytes: int, device: torch.device, file: int | None) -> Tensor:
    """Make `[num_bytes]` uint8 zeros, in `file` if given; on a CPU a page becomes resident when it is first written."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    if file is not None:
        os.ftruncate(file, num_bytes)
        pages = mmap.mmap(file, num_bytes)
    else:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _independent_runs(copies: Sequence[BlockCopy]) -> Iterator[list[BlockCopy]]:
    """Cut copies into runs in which no block is written and also read, or written twice."""
    run: list[BlockCopy] = []
    sources: set[tuple[int, int]] = set()
    targets: set[tuple[int, int]] = set()
    for copy in copies:
        assert NULL_BLOCK not in (copy.source, copy.target), "the null block is neither copied nor written"
        source, target = (copy.group_id, copy.source), (copy.group_id, copy.target)
        if source in targets or target in targets or target in sources:
            yield run
            run, sources, targets = [], set(), set()
        run.append(copy)
        sources.add(source)
        targets.add(target)
    if run:
        yield run
