"""A store in this process's memory: for tests, and as the oracle of the others."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dalsegno.store.base import Buffers, Status, flat_view, num_buffer_bytes
from dalsegno.store.keys import StoreKey

__all__ = ["MemoryStore"]


@dataclass(slots=True)
class _Entry:
    payload: bytes
    tick: int


class MemoryStore:
    """A dict with a bound on the bytes of its objects; evicts in the order of the embedded store."""

    def __init__(self, num_bytes: int | None = None) -> None:
        """Start empty, with room for `num_bytes` of objects, for any number of bytes if None."""
        self._num_bytes = num_bytes
        self._lock = threading.Lock()
        self._entries: dict[StoreKey, _Entry] = {}
        self._used = 0
        self._tick = 0
        self._counters: Counter[str] = Counter(evicted_objects=0)

    def exists(self, keys: Sequence[StoreKey]) -> list[Status]:
        """See `Store.exists`."""
        with self._lock:
            return [Status.OK if key in self._entries else Status.MISS for key in keys]

    def put(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        """See `Store.put`; all objects of a call get the same tick."""
        with self._lock:
            self._tick += 1
            return [self._put(key, pieces) for key, pieces in zip(keys, buffers, strict=True)]

    def get(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        """See `Store.get`."""
        with self._lock:
            return [self._get(key, pieces) for key, pieces in zip(keys, buffers, strict=True)]

    def remove(self, keys: Sequence[StoreKey]) -> list[Status]:
        """See `Store.remove`."""
        with self._lock:
            return [Status.OK if self._drop(key) else Status.MISS for key in keys]

    def clear(self, namespace: str | None = None, salt: str | None = None) -> int:
        """See `Store.clear`."""
        with self._lock:
            chosen = [key for key in self._entries if namespace in (None, key.namespace) and salt in (None, key.salt)]
            return sum(self._drop(key) for key in chosen)

    def touch(self, keys: Sequence[StoreKey]) -> None:
        """See `Store.touch`."""
        with self._lock:
            self._tick += 1
            for key in keys:
                if key in self._entries:
                    self._entries[key].tick = self._tick

    def register(self, buffer: memoryview) -> None:
        """Need nothing announced."""

    def stats(self) -> dict[str, int | float]:
        """See `Store.stats`."""
        with self._lock:
            return {"objects": len(self._entries), "used_bytes": self._used, **self._counters}

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._used = 0

    def _put(self, key: StoreKey, pieces: Buffers) -> Status:
        if key in self._entries:
            return Status.EXISTS
        size = num_buffer_bytes(pieces)
        if self._num_bytes is not None and not self._make_room(size, self._num_bytes):
            return Status.NO_ROOM
        self._entries[key] = _Entry(b"".join(map(flat_view, pieces)), self._tick)
        self._used += size
        return Status.OK

    def _make_room(self, size: int, num_bytes: int) -> bool:
        """Evict what is older than this call until `size` more fits; whether it does."""
        if self._used + size <= num_bytes:
            return True
        victims = [key for key, entry in self._entries.items() if entry.tick < self._tick]
        evictable = sum(len(self._entries[key].payload) for key in victims)
        if self._used - evictable + size > num_bytes:
            return False
        group: tuple[int, int] | None = None
        for key in sorted(victims, key=lambda key: (self._entries[key].tick, -key.boundary)):
            last, group = group, (self._entries[key].tick, key.boundary)
            if self._used + size <= num_bytes and group != last:
                break
            self._drop(key)
            self._counters["evicted_objects"] += 1
        return True

    def _get(self, key: StoreKey, pieces: Buffers) -> Status:
        entry = self._entries.get(key)
        if entry is None:
            return Status.MISS
        if num_buffer_bytes(pieces) != len(entry.payload):
            return Status.CORRUPT
        start = 0
        for piece in map(flat_view, pieces):
            piece[:] = entry.payload[start : start + len(piece)]
            start += len(piece)
        return Status.OK

    def _drop(self, key: StoreKey) -> bool:
        entry = self._entries.pop(key, None)
        self._used -= 0 if entry is None else len(entry.payload)
        return entry is not None
