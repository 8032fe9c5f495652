"""Memory that a client may read and write: what was registered as it is, anything else by way of an arena.

Registering memory is slow and, over RDMA, what makes it readable at all, so small buffers that come and go (headers,
memory of blocks nobody wants) are copied through arenas that stay registered.
"""

import bisect
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from dalsegno.store.base import Buffers, flat_view

__all__ = ["ARENA_BYTES", "Batch", "ClientMemory"]

logger = logging.getLogger(__name__)

ARENA_BYTES = 2**20
"""Bytes of an arena; an object with more outside registered memory gets an arena of its own for the call."""

_BATCH_BYTES = 2**26
_BATCH_KEYS = 256


@dataclass(slots=True)
class Batch:
    """Some objects of a call, as the client takes them.

    Attributes:
        indices: which objects of the call these are.
        addresses: of each object's pieces; inside `ClientMemory.arena` also of those that go through it.
        sizes: bytes of each piece.
        moved: of each object the pieces that go through the arena: place in `addresses`, offset in the arena, piece.
        num_bytes: bytes of all pieces.
        arena_bytes: bytes of those that go through the arena.
    """

    indices: list[int] = field(default_factory=list)
    addresses: list[list[int]] = field(default_factory=list)
    sizes: list[list[int]] = field(default_factory=list)
    moved: list[list[tuple[int, int, memoryview]]] = field(default_factory=list)
    num_bytes: int = 0
    arena_bytes: int = 0

    def copy_in(self, arena: memoryview) -> None:
        """Copy the pieces of all objects into the arena."""
        for moved in self.moved:
            for _, offset, piece in moved:
                arena[offset : offset + piece.nbytes] = piece

    def copy_out(self, arena: memoryview, position: int) -> None:
        """Copy the pieces of the object at `position` of this batch out of the arena."""
        for _, offset, piece in self.moved[position]:
            piece[:] = arena[offset : offset + piece.nbytes]


class ClientMemory:
    """What is registered with one client. May be used from several threads."""

    def __init__(self, register: Callable[[int, int], bool], unregister: Callable[[int], object]) -> None:
        """Register by `register(address, bytes)`, which says whether that has worked."""
        self._register = register
        self._unregister = unregister
        self._regions: list[tuple[int, int, memoryview]] = []
        self._free: list[tuple[int, memoryview]] = []
        self._arenas: dict[int, memoryview] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that are registered."""
        return sum(end - start for start, end, _ in self._regions) + ARENA_BYTES * len(self._arenas)

    def register(self, buffer: memoryview) -> None:
        """Register memory, once; what cannot be registered is used by way of an arena."""
        view = flat_view(buffer)
        if not view.nbytes:
            return
        start = _address(view)
        end = start + view.nbytes
        if self._holds(start, end):
            return
        if self._register(start, view.nbytes):
            self._regions = sorted([*self._regions, (start, end, view)], key=lambda region: region[0])
        else:
            logger.warning("Mooncake cannot register %d bytes of memory; they are copied instead", view.nbytes)

    def unregister_all(self, unregister: Callable[[int], object]) -> None:
        """Forget everything by `unregister(address)`; nothing is under way."""
        for address in [start for start, _, _ in self._regions] + list(self._arenas):
            unregister(address)
        self._regions, self._free, self._arenas = [], [], {}

    def batches(self, buffers: Sequence[Buffers], indices: Sequence[int]) -> Iterator[Batch]:
        """Cut the objects `indices` of a call into batches, each with as much as goes through one arena."""
        batch = Batch()
        for index in indices:
            addresses: list[int] = []
            outside: list[tuple[int, memoryview]] = []
            pieces = [view for view in map(flat_view, buffers[index]) if view.nbytes]
            for place, piece in enumerate(pieces):
                address = _address(piece)
                if not self._holds(address, address + piece.nbytes):
                    outside.append((place, piece))
                addresses.append(address)
            sizes = [piece.nbytes for piece in pieces]
            num_bytes, arena_bytes = sum(sizes), sum(piece.nbytes for _, piece in outside)
            if batch.indices and (
                len(batch.indices) == _BATCH_KEYS
                or batch.num_bytes + num_bytes > _BATCH_BYTES
                or batch.arena_bytes + arena_bytes > ARENA_BYTES
            ):
                yield batch
                batch = Batch()
            ends = itertools.accumulate((piece.nbytes for _, piece in outside), initial=batch.arena_bytes)
            batch.indices.append(index)
            batch.addresses.append(addresses)
            batch.sizes.append(sizes)
            batch.moved.append([(place, offset, piece) for (place, piece), offset in zip(outside, ends, strict=False)])
            batch.num_bytes += num_bytes
            batch.arena_bytes += arena_bytes
        if batch.indices:
            yield batch

    @contextmanager
    def arena(self, batch: Batch) -> Iterator[memoryview]:
        """Lend an arena for the pieces that need one, and put their addresses into the batch."""
        if not batch.arena_bytes:
            yield memoryview(b"")
            return
        start, view = self._take(batch.arena_bytes)
        for addresses, moved in zip(batch.addresses, batch.moved, strict=True):
            for place, offset, _ in moved:
                addresses[place] = start + offset
        try:
            yield view
        finally:
            self._give_back(start, view)

    def _take(self, num_bytes: int) -> tuple[int, memoryview]:
        if num_bytes <= ARENA_BYTES:
            try:
                return self._free.pop()
            except IndexError:
                pass
        view = memoryview(bytearray(max(num_bytes, ARENA_BYTES)))
        start = _address(view)
        # Over TCP an arena serves unregistered as well; over RDMA its transfers fail, and that is told key by key.
        if self._register(start, view.nbytes) and view.nbytes == ARENA_BYTES:
            self._arenas[start] = view
        return start, view

    def _give_back(self, start: int, view: memoryview) -> None:
        if start in self._arenas:
            self._free.append((start, view))
        else:
            self._unregister(start)

    def _holds(self, start: int, end: int) -> bool:
        """Whether one registered region holds these addresses."""
        regions = self._regions
        index = bisect.bisect_right(regions, start, key=lambda region: region[0]) - 1
        return index >= 0 and end <= regions[index][1]


def _address(view: memoryview) -> int:
    """Return where the bytes of a flat view that is not empty lie."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
