"""Memory that a client may read and write: large registered pieces where they are, the rest by way of an arena.

Registering memory is slow and, over RDMA, what makes it readable at all, so memory that comes and goes (headers, blocks
nobody wants) is copied through arenas that stay registered. So are small pieces, one behind the other: over TCP each
costs tens of microseconds besides its bytes, and transfers fail where more than two thousand are under way at once.
"""

import bisect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from dalsegno.store.base import Buffers, flat_view

__all__ = ["ARENA_BYTES", "SMALL_BYTES", "Batch", "ClientMemory"]

logger = logging.getLogger(__name__)

ARENA_BYTES = 2**23
"""Bytes of an arena; an object that needs more gets an arena of its own for the call."""

SMALL_BYTES = 2**18
"""Over TCP pieces below this are copied: moving them one by one takes longer than that."""

_BATCH_BYTES = 2**26
_BATCH_PIECES = 128


@dataclass(slots=True)
class _Object:
    """One object as the client takes it: pieces where they lie, and runs of the arena between them.

    Attributes:
        addresses: of each piece or run; of a run 0 until the arena is there.
        sizes: bytes of each.
        runs: place in `addresses` and offset in the object's part of the arena, of each run.
        copied: the pieces that make up the runs, in order.
        arena_bytes: bytes of these.
    """

    addresses: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    copied: list[memoryview] = field(default_factory=list)
    arena_bytes: int = 0

    def add(self, piece: memoryview, address: int | None) -> None:
        """Append a piece that is used where it lies, or copied if `address` is None."""
        if address is not None:
            self.addresses.append(address)
            self.sizes.append(piece.nbytes)
            return
        if not self.runs or self.runs[-1][0] != len(self.addresses) - 1:
            self.runs.append((len(self.addresses), self.arena_bytes))
            self.addresses.append(0)
            self.sizes.append(0)
        self.sizes[-1] += piece.nbytes
        self.copied.append(piece)
        self.arena_bytes += piece.nbytes


class Batch:
    """Some objects of a call, as the client takes them.

    Attributes:
        indices: which objects of the call these are.
        addresses, sizes: of the pieces of each object; complete inside `ClientMemory.arena`.
        num_bytes: bytes of each object.
        arena_bytes: bytes that go through the arena.
    """

    def __init__(self) -> None:
        """Begin with no object."""
        self.indices: list[int] = []
        self.num_bytes: list[int] = []
        self.arena_bytes = 0
        self._objects: list[_Object] = []
        self._total_bytes = 0
        self._num_pieces = 0

    @property
    def addresses(self) -> list[list[int]]:
        """Addresses of the pieces of each object."""
        return [item.addresses for item in self._objects]

    @property
    def sizes(self) -> list[list[int]]:
        """Bytes of the pieces of each object."""
        return [item.sizes for item in self._objects]

    def has_room(self, item: _Object) -> bool:
        """Whether another object may be added without exceeding what one call may have."""
        return not self._objects or (
            self._num_pieces + len(item.sizes) <= _BATCH_PIECES
            and self._total_bytes + sum(item.sizes) <= _BATCH_BYTES
            and self.arena_bytes + item.arena_bytes <= ARENA_BYTES
        )

    def add(self, index: int, item: _Object) -> None:
        """Add the object `index` of the call."""
        self.indices.append(index)
        self.num_bytes.append(sum(item.sizes))
        self._objects.append(item)
        self._num_pieces += len(item.sizes)
        self._total_bytes += self.num_bytes[-1]
        self.arena_bytes += item.arena_bytes

    def use_arena(self, start: int) -> None:
        """Put the addresses of the runs into the objects; the arena begins at `start`."""
        for item in self._objects:
            for place, offset in item.runs:
                item.addresses[place] = start + offset
            start += item.arena_bytes

    def copy_in(self, arena: memoryview) -> None:
        """Copy what goes through the arena into it."""
        offset = 0
        for item in self._objects:
            for piece in item.copied:
                arena[offset : offset + piece.nbytes] = piece
                offset += piece.nbytes

    def copy_out(self, arena: memoryview, chosen: Sequence[bool]) -> None:
        """Copy the chosen objects' part of the arena to where it belongs."""
        offset = 0
        for item, is_chosen in zip(self._objects, chosen, strict=True):
            end = offset + item.arena_bytes
            for piece in item.copied if is_chosen else ():
                piece[:] = arena[offset : offset + piece.nbytes]
                offset += piece.nbytes
            offset = end


class ClientMemory:
    """What is registered with one client. May be used from several threads."""

    def __init__(
        self, register: Callable[[int, int], bool], unregister: Callable[[int], object], small_bytes: int
    ) -> None:
        """Register by `register(address, bytes)`, which says whether that has worked; copy below `small_bytes`."""
        self._register = register
        self._unregister = unregister
        self._small_bytes = small_bytes
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
        """Cut the objects `indices` of a call into batches, each with as much as one call of the client may have."""
        batch = Batch()
        for index in indices:
            item = self._object(buffers[index])
            if not batch.has_room(item):
                yield batch
                batch = Batch()
            batch.add(index, item)
        if batch.indices:
            yield batch

    @contextmanager
    def arena(self, batch: Batch) -> Iterator[memoryview]:
        """Lend an arena for what the batch has to copy, and put its addresses into the batch."""
        if not batch.arena_bytes:
            yield memoryview(b"")
            return
        start, view = self._take(batch.arena_bytes)
        batch.use_arena(start)
        try:
            yield view
        finally:
            self._give_back(start, view)

    def _object(self, buffers: Buffers) -> _Object:
        """Decide piece by piece whether it is used where it lies."""
        item = _Object()
        # All in one run where that is what it takes to stay within a call.
        small = self._small_bytes if len(buffers) <= _BATCH_PIECES else sys.maxsize
        for piece in map(flat_view, buffers):
            if not piece.nbytes:
                continue
            address = None
            if piece.nbytes >= small:
                found = _address(piece)
                address = found if self._holds(found, found + piece.nbytes) else None
            item.add(piece, address)
        return item

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
