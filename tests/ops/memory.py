"""Slab memory for op tests: everything a request has not written is NaN, and blocks lie apart."""

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dalsegno.ops.batch import PagedBatch, PagedLayerCache, StateBatch, StateLayerCache
from dalsegno.ops.views import PagedView, StateView

NAN = float("nan")


def offsets_of(lengths: Sequence[int]) -> list[int]:
    """Return the token offsets of requests with these numbers of tokens."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return offsets


@dataclass
class SlabMemory:
    """NaN-filled memory cut into slabs of blocks of parts, `gap` elements between blocks and slabs; slab 0 is zero."""

    shapes: Mapping[str, tuple[int, ...]]
    num_slabs: int
    blocks_per_slab: int
    gap: int = 3
    dtype: torch.dtype = torch.float32
    flat: Tensor = field(init=False)

    def __post_init__(self) -> None:
        sizes = [torch.Size(shape).numel() for shape in self.shapes.values()]
        self.block_stride = sum(sizes) + self.gap
        self.slab_stride = self.blocks_per_slab * self.block_stride + self.gap
        self.flat = torch.full((self.num_slabs * self.slab_stride,), NAN, dtype=self.dtype)
        self.flat[: self.slab_stride] = 0

    def part(self, name: str) -> Tensor:
        """Return one part as `[num_slabs, blocks_per_slab, *shape]`."""
        names = list(self.shapes)
        before = sum(torch.Size(self.shapes[other]).numel() for other in names[: names.index(name)])
        shape = self.shapes[name]
        strides = (self.slab_stride, self.block_stride, *torch.empty(shape, device="meta").stride())
        return self.flat.as_strided((self.num_slabs, self.blocks_per_slab, *shape), strides, before)

    def block(self, name: str, block_id: int) -> Tensor:
        """Return one block's part."""
        return self.part(name)[block_id // self.blocks_per_slab, block_id % self.blocks_per_slab]

    def clone(self) -> "SlabMemory":
        """Return a copy with bytes of its own."""
        other = copy.copy(self)
        other.flat = self.flat.clone()
        return other


class BlockDealer:
    """Gives out the blocks of a memory in a random order."""

    def __init__(self, memory: SlabMemory, seed: int) -> None:
        self.free = list(range(memory.blocks_per_slab, memory.num_slabs * memory.blocks_per_slab))
        random.Random(seed).shuffle(self.free)

    def take(self, count: int = 1) -> list[int]:
        """Return `count` blocks nobody has."""
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count, "the test's memory is too small"
        return taken


def state_cache(memory: SlabMemory, batch: StateBatch) -> StateLayerCache:
    """Return the cache of a state layer that has all parts of the memory."""
    return StateLayerCache(StateView({name: memory.part(name) for name in memory.shapes}), batch)


def paged_cache(memory: SlabMemory, batch: PagedBatch) -> PagedLayerCache:
    """Return the cache of an attention layer over the parts "key" and "value"."""
    return PagedLayerCache(PagedView(memory.part("key"), memory.part("value")), batch)


def same_memory(left: SlabMemory, right: SlabMemory, tolerance: float = 2e-5) -> None:
    """Check that two memories hold the same, NaN where NaN."""
    torch.testing.assert_close(left.flat, right.flat, atol=tolerance, rtol=tolerance, equal_nan=True)
