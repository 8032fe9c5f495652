"""The Mooncake store as a `Store`: batches, what codes mean for keys, counters.

Objects lie in memory that clients lend to the master, under the canonical text of their keys, and the master evicts
them. Bytes move between it and the caller's registered memory without a copy. A master that does not answer makes
every result an ERROR, at once.
"""

import logging
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from dalsegno.errors import EngineError
from dalsegno.store.base import Buffers, Status
from dalsegno.store.keys import StoreKey
from dalsegno.store.mooncake.client import MooncakeClient, connect
from dalsegno.store.mooncake.codes import Code, code_name, status_of
from dalsegno.store.mooncake.config import MooncakeConfig
from dalsegno.store.mooncake.link import Link
from dalsegno.store.mooncake.memory import SMALL_BYTES, Batch, ClientMemory

__all__ = ["MooncakeStore", "open_mooncake"]

logger = logging.getLogger(__name__)

_KEYS = 512
_COUNTERS = ("put_objects", "put_bytes", "get_objects", "get_bytes", "no_room", "corrupt", "lease_expired", "errors")


def open_mooncake(settings: Mapping[str, Any]) -> "MooncakeStore":
    """Open the store of a master, by `MooncakeConfig.from_settings`.

    Raises:
        OptionError: a setting is wrong, the package is missing, or no master answers.
    """
    config = MooncakeConfig.from_settings(settings)
    small_bytes = SMALL_BYTES if config.protocol == "tcp" else 0
    store = MooncakeStore(connect(config), lent_bytes=config.global_segment_size, small_bytes=small_bytes)
    logger.info(
        "Mooncake: master %s, %s; this process, %s, lends %d bytes",
        config.master_server_address,
        config.protocol,
        config.local_hostname,
        config.global_segment_size,
    )
    return store


class MooncakeStore:
    """The objects of one master, through a client that it closes.

    A put cannot tell whether an object was there, and answers OK then; nothing is overwritten. Objects of no bytes are
    not stored. What is lent by a process is gone when that ends, and everything when the master ends.
    """

    def __init__(
        self,
        client: MooncakeClient,
        *,
        lent_bytes: int = 0,
        small_bytes: int = SMALL_BYTES,
        probe_interval_s: float = 0.5,
        close_timeout_s: float = 10.0,
    ) -> None:
        """Use a client that is set up.

        Args:
            client: made by `connect`, or another with its calls.
            lent_bytes: what it lends, for `stats`.
            small_bytes: smaller pieces of registered memory are copied too.
            probe_interval_s: pause before a master that did not answer is asked again.
            close_timeout_s: how long `close` waits for calls under way; a client that hangs is left alone.
        """
        self._link = Link(client, probe_interval_s, close_timeout_s)
        self._memory = ClientMemory(
            lambda address, size: self._link.call_locally(1, lambda c: [c.register_buffer(address, size)]) == [Code.OK],
            lambda address: self._link.call_locally(1, lambda c: [c.unregister_buffer(address)]),
            small_bytes,
        )
        self._lent_bytes = lent_bytes
        self._counting = threading.Lock()
        self._counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))

    def exists(self, keys: Sequence[StoreKey]) -> list[Status]:
        """See `Store.exists`; Mooncake keeps what exists from eviction for the time of a lease."""
        statuses: list[Status] = []
        for batch in _cut(keys):
            codes = self._link.call(len(batch), partial(_exists, batch))
            statuses += (Status.OK if code == 1 else Status.MISS if code == 0 else status_of(code) for code in codes)
            self._count_failures("exists", codes)
        return statuses

    def put(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        """See `Store.put`."""
        first = {key: index for index, key in reversed(list(enumerate(keys)))}
        statuses = [Status.ERROR] * len(keys)
        for batch in self._memory.batches(buffers, sorted(first.values())):
            names = [keys[index].text for index in batch.indices]
            with self._memory.arena(batch) as arena:
                batch.copy_in(arena)
                codes = self._link.call(len(names), partial(_put, names, batch))
            self._count_failures("put", codes)
            for index, code, num_bytes in zip(batch.indices, codes, batch.num_bytes, strict=True):
                statuses[index] = status_of(code)
                self._count_moved("put", statuses[index], num_bytes)
        for index, key in enumerate(keys):
            if first[key] != index:
                statuses[index] = Status.EXISTS if statuses[first[key]] is Status.OK else statuses[first[key]]
        return statuses

    def get(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        """See `Store.get`."""
        statuses = [Status.ERROR] * len(keys)
        for batch in self._memory.batches(buffers, range(len(keys))):
            names = [keys[index].text for index in batch.indices]
            with self._memory.arena(batch) as arena:
                codes = self._link.call(len(names), partial(_get, names, batch))
                found = [self._outcome(*read) for read in zip(names, codes, batch.num_bytes, strict=True)]
                batch.copy_out(arena, [status is Status.OK for status in found])
            for index, status, num_bytes in zip(batch.indices, found, batch.num_bytes, strict=True):
                statuses[index] = status
                self._count_moved("get", status, num_bytes)
            self._count_failures("get", codes)
        return statuses

    def remove(self, keys: Sequence[StoreKey]) -> list[Status]:
        """See `Store.remove`; what others read at this moment goes too."""
        statuses: list[Status] = []
        for batch in _cut(keys):
            codes = self._link.call(len(batch), partial(_remove, batch))
            self._count_failures("remove", codes)
            statuses += map(status_of, codes)
        return statuses

    def clear(self, namespace: str | None = None, salt: str | None = None) -> int:
        """See `Store.clear`; keys that are not ours stay, whatever is asked."""
        chosen = [re.escape(value) if value is not None else "[0-9a-f]+" for value in (namespace, salt)]
        pattern = f"^dalsegno:{chosen[0]}:{chosen[1]}:"
        [count] = self._link.call(1, lambda client: [client.remove_by_regex(pattern, True)])
        self._count_failures("clear", [count])
        if count < 0:
            raise EngineError(f"the mooncake store could not be emptied: {code_name(count)}")
        return count

    def touch(self, keys: Sequence[StoreKey]) -> None:
        """Ignore it: the master notes what is read."""

    def register(self, buffer: memoryview) -> None:
        """See `Store.register`; memory that is not announced is copied."""
        self._memory.register(buffer)

    def stats(self) -> dict[str, int | float]:
        """See `Store.stats`: counters of this process, failures also by call and by Mooncake's name of the code."""
        with self._counting:
            found: dict[str, int | float] = dict(self._counters)
        return found | {
            "lent_bytes": self._lent_bytes,
            "registered_bytes": self._memory.num_bytes,
            "unreachable": int(self._link.is_out),
            "times_lost": self._link.num_lost,
            "reconnects": self._link.num_reconnects,
            "refused_calls": self._link.num_refused,
        }

    def close(self) -> None:
        """See `Store.close`; other threads' calls under way are waited for, later ones are errors."""
        self._link.close(lambda client: self._memory.unregister_all(client.unregister_buffer), keep=self._memory)

    def _outcome(self, name: str, code: int, num_bytes: int) -> Status:
        """What a read has given; a code that may come from another size is told apart by asking for the size."""
        if code > 0:
            return Status.OK if code == num_bytes else Status.CORRUPT
        if code in (Code.INVALID_PARAMS, Code.TRANSFER_FAIL):
            [size] = self._link.call(1, lambda client: [client.get_size(name)])
            if size > 0 and size != num_bytes:
                return Status.CORRUPT
            return status_of(size) if size < 0 else Status.ERROR
        return Status.ERROR if code == 0 else status_of(code)

    def _count_moved(self, call: str, status: Status, num_bytes: int) -> None:
        with self._counting:
            if status is Status.NO_ROOM and not self._counters["put_objects"] + self._counters["no_room"]:
                logger.warning("the Mooncake master had no room for the first object: does anybody lend it memory?")
            if status is Status.OK:
                self._counters[f"{call}_objects"] += 1
                self._counters[f"{call}_bytes"] += num_bytes
            elif status in (Status.NO_ROOM, Status.CORRUPT):
                self._counters[status.value] += 1

    def _count_failures(self, call: str, codes: Sequence[int]) -> None:
        failed = [code for code in codes if code < 0 and status_of(code) is not Status.MISS]
        with self._counting:
            self._counters["lease_expired"] += failed.count(Code.LEASE_EXPIRED)
            self._counters["errors"] += sum(status_of(code) is Status.ERROR for code in failed)
            self._counters.update(f"{call}_{code_name(code)}" for code in failed)


def _exists(names: list[str], client: MooncakeClient) -> list[int]:
    return client.batch_is_exist(names)


def _remove(names: list[str], client: MooncakeClient) -> list[int]:
    return client.batch_remove(names, True)


def _put(names: list[str], batch: Batch, client: MooncakeClient) -> list[int]:
    return client.batch_put_from_multi_buffers(names, batch.addresses, batch.sizes)


def _get(names: list[str], batch: Batch, client: MooncakeClient) -> list[int]:
    return client.batch_get_into_multi_buffers(names, batch.addresses, batch.sizes)


def _cut(keys: Sequence[StoreKey]) -> list[list[str]]:
    return [[key.text for key in keys[start : start + _KEYS]] for start in range(0, len(keys), _KEYS)]
