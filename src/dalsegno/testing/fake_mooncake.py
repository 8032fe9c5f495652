"""A Mooncake in this process: a master's tables, and clients with the calls and the exact codes of the real package.

What takes time or luck with the real one is done by hand here: leases run out on a clock that tests advance, objects
are evicted, owners of segments die, the master stops and comes back, and hooks act in the middle of a call.
"""

import ctypes
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dalsegno.store.mooncake.codes import Code

__all__ = ["FakeMooncakeClient", "FakeMooncakeMaster"]


@dataclass(slots=True)
class _Object:
    owner: "FakeMooncakeClient"
    payload: bytearray
    is_complete: bool = False
    lease_until: float = 0.0


@dataclass(slots=True)
class FakeMooncakeMaster:
    """The tables that clients share.

    Attributes:
        lease_s: seconds that `exists` and a read protect an object.
        now: the clock of leases.
        objects: what is stored, by name, the oldest first.
        clients: those that are set up.
        outage: what every call returns while the master does not answer, RPC_FAIL or RPC_TIMEOUT; None while it does.
    """

    lease_s: float = 10.0
    now: float = 0.0
    objects: dict[str, _Object] = field(default_factory=dict)
    clients: list["FakeMooncakeClient"] = field(default_factory=list)
    outage: Code | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)

    def evict(self, *names: str) -> None:
        """Drop objects, those without a lease by default, the oldest first."""
        with self.lock:
            for name in names or [name for name, item in self.objects.items() if item.lease_until <= self.now]:
                del self.objects[name]

    def restart(self) -> None:
        """Forget all objects and answer again; the clients lend their segments to the new master by themselves."""
        with self.lock:
            self.objects.clear()
            self.outage = None

    def forget_dead(self) -> None:
        """Do what the real one does some seconds after a client has died: drop it, and what lay in its segment."""
        with self.lock:
            self.clients = [client for client in self.clients if client.is_alive]
            self.objects = {name: item for name, item in self.objects.items() if item.owner.is_alive}

    def place(self, num_bytes: int) -> "FakeMooncakeClient | None":
        """Return a client whose segment has room."""
        for client in self.clients:
            used = sum(len(item.payload) for item in self.objects.values() if item.owner is client)
            if used + num_bytes <= client.segment_bytes:
                return client
        return None


class FakeMooncakeClient:
    """A `MooncakeClient` that is set up.

    Attributes:
        hooks: by point of a call, what to do there, once each: "exists" and "get" before anything is done, "put"
            between the beginning and the end of an object's write, "copied" behind an object's copy, before its lease
            is checked.
        answers: by method, codes to return from the next call instead of what has happened.
        num_calls: calls by method.
        max_pieces: most pieces that one call has had; over TCP the real one fails with two thousand.
        used_after_close: methods that were called on the closed client; the real one would crash.
    """

    def __init__(self, master: FakeMooncakeMaster, segment_bytes: int = 0, *, must_register: bool = False) -> None:
        """Lend `segment_bytes`; `must_register` refuses memory that is not registered, as RDMA does."""
        self.master = master
        self.segment_bytes = segment_bytes
        self.is_alive = True
        self.hooks: defaultdict[str, list[Callable[[], None]]] = defaultdict(list)
        self.answers: dict[str, Sequence[int | None]] = {}
        self.num_calls: defaultdict[str, int] = defaultdict(int)
        self.max_pieces = 0
        self.used_after_close: list[str] = []
        self.regions: dict[int, int] = {}
        self._must_register = must_register
        self._closed = False
        master.clients.append(self)

    def die(self) -> None:
        """End as a killed process does: what lies in its segment is known to the master and cannot be read."""
        self.is_alive = False

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """See `MooncakeClient`."""
        self._called("register_buffer")
        if any(buffer_ptr < start + known and start < buffer_ptr + size for start, known in self.regions.items()):
            return Code.INVALID_PARAMS
        self.regions[buffer_ptr] = size
        return Code.OK

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """See `MooncakeClient`."""
        self._called("unregister_buffer")
        return Code.INVALID_PARAMS if self.regions.pop(buffer_ptr, None) is None else Code.OK

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """See `MooncakeClient`."""
        return self._batch("batch_is_exist", "exists", keys, self._exists)

    def batch_put_from_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]:
        """See `MooncakeClient`."""
        self._note_pieces(all_sizes)
        places = iter(zip(all_buffer_ptrs, all_sizes, strict=True))
        return self._batch("batch_put_from_multi_buffers", "", keys, lambda key: self._put(key, *next(places)))

    def batch_get_into_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]:
        """See `MooncakeClient`."""
        self._note_pieces(all_sizes)
        places = iter(zip(all_buffer_ptrs, all_sizes, strict=True))
        return self._batch("batch_get_into_multi_buffers", "get", keys, lambda key: self._get(key, *next(places)))

    def batch_remove(self, keys: list[str], force: bool = False) -> list[int]:
        """See `MooncakeClient`."""
        return self._batch("batch_remove", "", keys, lambda key: self._remove(key, force))

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """See `MooncakeClient`."""

        def remove(_: str) -> int:
            names = [name for name in self.master.objects if re.search(regex_pattern, name)]
            return sum(self._remove(name, force) == Code.OK for name in names)

        return self._batch("remove_by_regex", "", [""], remove)[0]

    def get_size(self, key: str, /) -> int:
        """See `MooncakeClient`."""

        def size(_: str) -> int:
            item = self.master.objects.get(key)
            return Code.OBJECT_NOT_FOUND if item is None else len(item.payload)

        return self._batch("get_size", "", [key], size)[0]

    def remove_all(self, force: bool = False) -> int:
        """Remove what everybody has stored, as the real one does; the store never calls it."""

        def remove(_: str) -> int:
            return sum(self._remove(name, force) == Code.OK for name in list(self.master.objects))

        return self._batch("remove_all", "", [""], remove)[0]

    def close(self) -> int:
        """See `MooncakeClient`."""
        self._called("close")
        self._closed = True
        self.is_alive = False
        self.master.forget_dead()
        return Code.OK

    def _note_pieces(self, all_sizes: list[list[int]]) -> None:
        self.max_pieces = max(self.max_pieces, sum(map(len, all_sizes)))

    def _called(self, method: str) -> None:
        self.num_calls[method] += 1
        if self._closed and method != "close":
            self.used_after_close.append(method)

    def _batch(self, method: str, point: str, keys: Sequence[str], answer: Callable[[str], int]) -> list[int]:
        self._called(method)
        self._act(point)
        if self.master.outage is not None:
            return [self.master.outage] * len(keys)
        codes: list[int] = [answer(key) for key in keys]
        planned = self.answers.pop(method, None)
        return codes if planned is None else list(planned)  # type: ignore[arg-type]  # what the real one never returns

    def _act(self, point: str) -> None:
        if self.hooks[point]:
            self.hooks[point].pop(0)()

    def _exists(self, name: str) -> int:
        with self.master.lock:
            item = self.master.objects.get(name)
            if item is None or not item.is_complete:
                return 0
            item.lease_until = self.master.now + self.master.lease_s
            return 1

    def _put(self, name: str, addresses: list[int], sizes: list[int]) -> int:
        if not sum(sizes) or not self._are_usable(addresses, sizes):
            return Code.INVALID_PARAMS
        with self.master.lock:
            if name in self.master.objects:
                return Code.OK  # what the real one makes of OBJECT_ALREADY_EXISTS
            owner = self.master.place(sum(sizes))
            if owner is None:
                return Code.NO_AVAILABLE_HANDLE
            item = _Object(owner, bytearray())
            self.master.objects[name] = item
            item.payload += b"".join(ctypes.string_at(*piece) for piece in zip(addresses, sizes, strict=True))
        self._act("put")
        with self.master.lock:
            if not owner.is_alive:
                self.master.objects.pop(name, None)
                return Code.TRANSFER_FAIL
            item.is_complete = True
        return Code.OK

    def _get(self, name: str, addresses: list[int], sizes: list[int]) -> int:
        with self.master.lock:
            item = self.master.objects.get(name)
            if item is None:
                return Code.OBJECT_NOT_FOUND
            if not item.is_complete:
                return Code.REPLICA_IS_NOT_READY
            lease_until = item.lease_until = self.master.now + self.master.lease_s
        if sum(sizes) < len(item.payload):
            return Code.INVALID_PARAMS
        if sum(sizes) > len(item.payload) or not item.owner.is_alive or not self._are_usable(addresses, sizes):
            return Code.TRANSFER_FAIL
        offset = 0
        for address, size in zip(addresses, sizes, strict=True):
            ctypes.memmove(address, bytes(item.payload[offset : offset + size]), size)
            offset += size
        self._act("copied")
        if not item.owner.is_alive:
            return Code.TRANSFER_FAIL
        return Code.LEASE_EXPIRED if self.master.now >= lease_until else offset

    def _remove(self, name: str, force: bool) -> int:
        with self.master.lock:
            item = self.master.objects.get(name)
            if item is None:
                return Code.OBJECT_NOT_FOUND
            if item.lease_until > self.master.now and not force:
                return Code.OBJECT_HAS_LEASE
            del self.master.objects[name]
            return Code.OK

    def _are_usable(self, addresses: list[int], sizes: list[int]) -> bool:
        """Whether the client may read and write there."""
        return not self._must_register or all(
            any(start <= address and address + size <= start + known for start, known in self.regions.items())
            for address, size in zip(addresses, sizes, strict=True)
        )
