"""A store that fails: at the n-th call, or now and then by a seed. What it does is what real stores were seen to do."""

import enum
import random
import threading
from collections import Counter
from collections.abc import Mapping, Sequence

from dalsegno.store.base import Buffers, Status, Store, flat_view
from dalsegno.store.keys import StoreKey
from dalsegno.store.wrappers.wrapped import WrappedStore

__all__ = ["Fault", "FaultyStore"]


@enum.unique
class Fault(enum.Enum):
    """What goes wrong; each belongs to one kind of call."""

    EXISTS_ERROR = "exists says ERROR for every key"
    EXISTS_RAISES = "exists raises"
    PUT_ERROR = "put stores nothing and says ERROR"
    PUT_NO_ROOM = "put stores nothing and says NO_ROOM"
    PUT_LAST_NO_ROOM = "put stores all but the last object, for which there is NO_ROOM"
    PUT_RAISES = "put raises after it has stored"
    GET_ERROR = "get says ERROR"
    GET_MISS = "get says MISS for what exists: evicted in between"
    GET_SHORT = "get fills the first half of the buffers only and says OK"
    GET_CORRUPT = "get changes one byte and says OK"
    GET_RAISES = "get raises"

    @property
    def call(self) -> str:
        """Which method it is a fault of."""
        return self.name.split("_", 1)[0].lower()


class FaultyStore(WrappedStore):
    """Fails in the ways of `Fault`; without faults it is the store inside.

    Attributes:
        injected: how often each fault has happened.
    """

    def __init__(
        self,
        inner: Store,
        *,
        at: Mapping[int, Fault] | None = None,
        rates: Mapping[Fault, float] | None = None,
        seed: int = 0,
    ) -> None:
        """Wrap `inner`.

        Args:
            inner: the store.
            at: faults by number of call, counted from 0 for each method.
            rates: how likely each fault is in a call of its method.
            seed: of the random choices.
        """
        super().__init__(inner)
        self._at = dict(at or {})
        self._rates = dict(rates or {})
        self._rng = random.Random(seed)
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.injected: Counter[Fault] = Counter()

    def exists(self, keys: Sequence[StoreKey]) -> list[Status]:
        """See `Store.exists`."""
        fault = self._next("exists")
        if fault is Fault.EXISTS_RAISES:
            raise RuntimeError("injected: exists raises")
        return [Status.ERROR] * len(keys) if fault is Fault.EXISTS_ERROR else self.inner.exists(keys)

    def put(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        """See `Store.put`."""
        fault = self._next("put")
        if fault is Fault.PUT_ERROR or fault is Fault.PUT_NO_ROOM:
            return [Status.ERROR if fault is Fault.PUT_ERROR else Status.NO_ROOM] * len(keys)
        if fault is Fault.PUT_LAST_NO_ROOM and keys:
            return [*self.inner.put(keys[:-1], buffers[:-1]), Status.NO_ROOM]
        statuses = self.inner.put(keys, buffers)
        if fault is Fault.PUT_RAISES:
            raise RuntimeError("injected: put raises")
        return statuses

    def get(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        """See `Store.get`."""
        fault = self._next("get")
        if fault is Fault.GET_RAISES:
            raise RuntimeError("injected: get raises")
        if fault is Fault.GET_ERROR or fault is Fault.GET_MISS:
            return [Status.ERROR if fault is Fault.GET_ERROR else Status.MISS] * len(keys)
        statuses = self.inner.get(keys, buffers)
        for status, pieces in zip(statuses, buffers, strict=True):
            if status is Status.OK and fault is Fault.GET_SHORT:
                _spoil_second_half(pieces)
            elif status is Status.OK and fault is Fault.GET_CORRUPT:
                _flip_last_byte(pieces)
        return statuses

    def _next(self, call: str) -> Fault | None:
        """Count a call; return its fault, if it has one."""
        with self._lock:
            number = self._calls[call]
            self._calls[call] += 1
            chosen = self._at.get(number)
            if chosen is None or chosen.call != call:
                chosen = None
                for fault, rate in self._rates.items():
                    if fault.call == call and self._rng.random() < rate:
                        chosen = fault
                        break
            if chosen is not None:
                self.injected[chosen] += 1
            return chosen


def _spoil_second_half(pieces: Buffers) -> None:
    start = sum(piece.nbytes for piece in pieces) // 2
    for piece in map(flat_view, pieces):
        first = min(max(start, 0), len(piece))
        piece[first:] = b"\xff" * (len(piece) - first)
        start -= len(piece)


def _flip_last_byte(pieces: Buffers) -> None:
    for piece in reversed([flat_view(piece) for piece in pieces]):
        if len(piece):
            piece[-1] ^= 0x01
            return
