"""Counting what is asked of a store and what it answers."""

import threading
from collections import Counter
from collections.abc import Sequence

from dalsegno.store.base import Buffers, Status, Store, num_buffer_bytes
from dalsegno.store.keys import StoreKey
from dalsegno.store.wrappers.wrapped import WrappedStore

__all__ = ["CountingStore"]


class CountingStore(WrappedStore):
    """Adds to `stats`: `<call>_calls`, `<call>_keys`, `<call>_<status>`, `put_ok_bytes`, `get_ok_bytes`."""

    def __init__(self, inner: Store) -> None:
        """Count what goes to `inner`."""
        super().__init__(inner)
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def exists(self, keys: Sequence[StoreKey]) -> list[Status]:
        """See `Store.exists`."""
        return self._count("exists", self.inner.exists(keys))

    def put(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        """See `Store.put`."""
        return self._count("put", self.inner.put(keys, buffers), buffers)

    def get(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        """See `Store.get`."""
        return self._count("get", self.inner.get(keys, buffers), buffers)

    def remove(self, keys: Sequence[StoreKey]) -> list[Status]:
        """See `Store.remove`."""
        return self._count("remove", self.inner.remove(keys))

    def clear(self, namespace: str | None = None, salt: str | None = None) -> int:
        """See `Store.clear`."""
        removed = self.inner.clear(namespace, salt)
        self._count("clear", [Status.OK] * removed)
        return removed

    def touch(self, keys: Sequence[StoreKey]) -> None:
        """See `Store.touch`."""
        self._count("touch", [Status.OK] * len(keys))
        self.inner.touch(keys)

    def stats(self) -> dict[str, int | float]:
        """See `Store.stats`."""
        with self._lock:
            return {**self.inner.stats(), **self.counts}

    def _count(self, call: str, statuses: list[Status], buffers: Sequence[Buffers] = ()) -> list[Status]:
        with self._lock:
            self.counts[f"{call}_calls"] += 1
            self.counts[f"{call}_keys"] += len(statuses)
            self.counts.update(f"{call}_{status.value}" for status in statuses)
            for status, pieces in zip(statuses, buffers, strict=False):
                if status is Status.OK:
                    self.counts[f"{call}_ok_bytes"] += num_buffer_bytes(pieces)
        return statuses
