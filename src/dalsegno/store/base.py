"""The protocol of stores: batched calls, one typed result per key, no exceptions for what is to be expected.

Every store and every wrapper passes the contract suite `dalsegno.testing.store_contract`.
"""

import enum
from collections.abc import Sequence
from typing import Protocol

from dalsegno.store.keys import StoreKey

__all__ = ["Buffers", "Status", "Store", "flat_view", "num_buffer_bytes"]

Buffers = Sequence[memoryview]
"""The bytes of one object, as C-contiguous pieces of memory that are read or written one after the other."""


@enum.unique
class Status(enum.Enum):
    """What happened to one key of a call."""

    OK = "ok"
    """Present, stored, read or removed."""
    MISS = "miss"
    """Not in the store."""
    EXISTS = "exists"
    """Something is stored under the key already, and stays."""
    NO_ROOM = "no_room"
    """Not stored: the store cannot make room for it."""
    CORRUPT = "corrupt"
    """Stored, but not as it was put; what the buffers hold now is undefined."""
    ERROR = "error"
    """The store could not do it, for a reason of its own; it says nothing about the key."""


class Store(Protocol):
    """A bounded space of immutable objects by key.

    Threads: all methods may be called from several threads at once, except that `close` comes last. They block for as
    long as the work takes. Results are in the order of the keys, one for each. Expected outcomes are results; what
    raises is a bug. Buffers belong to the caller: they are used only until the call returns.
    """

    def exists(self, keys: Sequence[StoreKey]) -> list[Status]:
        """Tell of each key whether it can be read: OK or MISS, ERROR where that is unknown. Changes no recency."""
        ...

    def put(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        """Store `buffers[i]`, one after the other, under `keys[i]`: OK, EXISTS, NO_ROOM or ERROR.

        An object is stored whole or not at all; when OK is returned others can read it. Older ones may be evicted for
        it, never what the same call has put. A key that comes twice exists the second time. Nothing is overwritten; a
        store that would have to ask others whether something was there may answer OK for EXISTS.
        """
        ...

    def get(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        """Fill the writable `buffers[i]` with the object under `keys[i]`: OK, MISS, CORRUPT or ERROR.

        They have to hold exactly as many bytes as are stored, else the result is CORRUPT. Unless it is OK, what the
        buffers hold afterwards is undefined. Changes no recency.
        """
        ...

    def remove(self, keys: Sequence[StoreKey]) -> list[Status]:
        """Remove objects: OK, MISS or ERROR."""
        ...

    def clear(self, namespace: str | None = None, salt: str | None = None) -> int:
        """Remove every object, or those of one namespace, of one salt tag, or of both; return how many there were.

        Raises:
            EngineError: some of them may still be there.
        """
        ...

    def touch(self, keys: Sequence[StoreKey]) -> None:
        """Note that these objects, all that one boundary needs, were used together; absent ones are left out.

        Cheap: a store with recency may write the note later. A store without recency ignores it.
        """
        ...

    def register(self, buffer: memoryview) -> None:
        """Announce memory that later calls will use; it stays valid until `close`. Most stores need no announcement."""
        ...

    def stats(self) -> dict[str, int | float]:
        """Return gauges and counters by name, bytes where the name says so."""
        ...

    def close(self) -> None:
        """Write what is pending and let go of everything; a second call does nothing. No other call may follow."""
        ...


def flat_view(buffer: memoryview | bytes | bytearray) -> memoryview:
    """Return the bytes of a C-contiguous buffer as a flat view of bytes; no copy."""
    view = memoryview(buffer)
    if view.format == "B" and view.ndim == 1:
        return view
    return view.cast("B") if view.nbytes else memoryview(b"")


def num_buffer_bytes(buffers: Buffers) -> int:
    """Return how many bytes the buffers hold together."""
    return sum(memoryview(buffer).nbytes for buffer in buffers)
