"""What wrappers share: every call goes to the store inside."""

from collections.abc import Sequence

from dalsegno.store.base import Buffers, Status, Store
from dalsegno.store.keys import StoreKey

__all__ = ["WrappedStore"]


class WrappedStore:
    """Passes everything on; a wrapper overrides what it is about."""

    def __init__(self, inner: Store) -> None:
        """Wrap `inner`, which is closed with this one."""
        self.inner = inner

    def exists(self, keys: Sequence[StoreKey]) -> list[Status]:
        """See `Store.exists`."""
        return self.inner.exists(keys)

    def put(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        """See `Store.put`."""
        return self.inner.put(keys, buffers)

    def get(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        """See `Store.get`."""
        return self.inner.get(keys, buffers)

    def remove(self, keys: Sequence[StoreKey]) -> list[Status]:
        """See `Store.remove`."""
        return self.inner.remove(keys)

    def clear(self, namespace: str | None = None, salt: str | None = None) -> int:
        """See `Store.clear`."""
        return self.inner.clear(namespace, salt)

    def touch(self, keys: Sequence[StoreKey]) -> None:
        """See `Store.touch`."""
        self.inner.touch(keys)

    def register(self, buffer: memoryview) -> None:
        """See `Store.register`."""
        self.inner.register(buffer)

    def stats(self) -> dict[str, int | float]:
        """See `Store.stats`."""
        return self.inner.stats()

    def close(self) -> None:
        """See `Store.close`."""
        self.inner.close()
