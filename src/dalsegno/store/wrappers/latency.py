"""A store that takes its time, as one behind a network does."""

import time
from collections.abc import Callable, Sequence

from dalsegno.store.base import Buffers, Status, Store, num_buffer_bytes
from dalsegno.store.keys import StoreKey
from dalsegno.store.wrappers.wrapped import WrappedStore

__all__ = ["LatencyStore"]


class LatencyStore(WrappedStore):
    """Waits before each call that reaches for objects: for the call, and for the bytes it moves."""

    def __init__(
        self,
        inner: Store,
        call_s: float = 0.0,
        *,
        bytes_per_s: float = float("inf"),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Wrap `inner`.

        Args:
            inner: the store.
            call_s: seconds per call.
            bytes_per_s: how fast bytes are put and got.
            sleep: how to wait.
        """
        super().__init__(inner)
        self._call_s = call_s
        self._bytes_per_s = bytes_per_s
        self._sleep = sleep

    def exists(self, keys: Sequence[StoreKey]) -> list[Status]:
        """See `Store.exists`."""
        self._wait()
        return self.inner.exists(keys)

    def put(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        """See `Store.put`."""
        self._wait(buffers)
        return self.inner.put(keys, buffers)

    def get(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        """See `Store.get`."""
        self._wait(buffers)
        return self.inner.get(keys, buffers)

    def remove(self, keys: Sequence[StoreKey]) -> list[Status]:
        """See `Store.remove`."""
        self._wait()
        return self.inner.remove(keys)

    def clear(self, namespace: str | None = None, salt: str | None = None) -> int:
        """See `Store.clear`."""
        self._wait()
        return self.inner.clear(namespace, salt)

    def _wait(self, buffers: Sequence[Buffers] = ()) -> None:
        self._sleep(self._call_s + sum(map(num_buffer_bytes, buffers)) / self._bytes_per_s)
