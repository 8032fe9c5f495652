"""The embedded store as a `Store`: batches, room, recency and what to say when something fails.

A put makes room in a transaction of its own, because LMDB can reuse pages only in later ones, then writes in batches of
bounded size. What is full or broken is a result and a counter; nothing here raises for it.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import lmdb

from dalsegno.errors import EngineError
from dalsegno.store.base import Buffers, Status, num_buffer_bytes
from dalsegno.store.embedded.catalog import Catalog
from dalsegno.store.embedded.environment import DEFAULT_STORE_BYTES, TOTALS_KEY, Environment, open_environment
from dalsegno.store.embedded.folder import Folder
from dalsegno.store.embedded.pieces import scatter
from dalsegno.store.embedded.records import PIECE_BYTES, Record, Totals, charge_of, piece_key
from dalsegno.store.keys import StoreKey

__all__ = ["DEFAULT_STORE_BYTES", "EmbeddedStore"]

logger = logging.getLogger(__name__)

_FAILURES = (lmdb.Error, OSError)
_BATCH_BYTES = 2**25
_REMOVALS = 256
_FLUSH_KEYS = 4096
_Result = TypeVar("_Result")
_COUNTERS = ("put_objects", "put_bytes", "get_objects", "get_bytes", "no_room", "corrupt", "errors")


@dataclass(slots=True)
class _Put:
    index: int
    key: StoreKey
    buffers: Buffers
    num_bytes: int
    status: Status | None = None


class EmbeddedStore:
    """Objects in a folder, bounded by bytes, shared by the processes of one host; survives them.

    What `put` has reported stored is not lost by killing any process. A power cut may lose the last `sync_interval_s`.
    """

    def __init__(
        self,
        path: str | Path,
        num_bytes: int | None = None,
        *,
        sync_interval_s: float = 5.0,
        create: bool = True,
    ) -> None:
        """Open the store in `path`, or make one.

        Args:
            path: the folder; made if it does not exist. It takes one and a half times `num_bytes` of the disk.
            num_bytes: bound on the objects' bytes, counted in whole pages; None for what the store has, or
                `DEFAULT_STORE_BYTES` for a new one. While others have the store open, theirs holds.
            sync_interval_s: seconds between syncs to the disk.
            create: False refuses what is no store.

        Raises:
            OptionError: `path` is something else, or not accessible.
        """
        self._open_again: Callable[[], Environment] = lambda: open_environment(
            Path(path), num_bytes, sync_interval_s, create=create
        )
        self._folder = Folder(Path(path))
        self._counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self._touched: deque[tuple[bytes, ...]] = deque()
        self._scratch = memoryview(bytearray(PIECE_BYTES))
        self._closing = threading.Lock()
        self._closed = False
        self._environment: Environment | None = None
        self._open()

    def exists(self, keys: Sequence[StoreKey]) -> list[Status]:
        """See `Store.exists`."""
        environment = self._environment or self._attach()
        if environment is None:
            return [Status.MISS] * len(keys)
        try:
            with environment.read() as txn:
                table = environment.objects
                return [Status.MISS if txn.get(key.digest, db=table) is None else Status.OK for key in keys]
        except _FAILURES as error:
            return self._failed("exists", error, len(keys))

    def put(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        """See `Store.put`."""
        environment = self._environment or self._open()
        puts = [
            _Put(index, key, pieces, num_buffer_bytes(pieces))
            for index, (key, pieces) in enumerate(zip(keys, buffers, strict=True))
        ]
        if environment is None:
            self._counters["no_room"] += len(puts)
            return [Status.NO_ROOM] * len(puts)
        with environment.writing:
            try:
                tick = self._next_tick(environment)
                for batch in _batches(puts):
                    self._put(environment, batch, tick)
            except lmdb.MapFullError:
                pass
            except _FAILURES as error:
                self._failed("put", error, sum(put.status is None for put in puts))
                return [put.status or Status.ERROR for put in puts]
        statuses = [put.status or Status.NO_ROOM for put in puts]
        self._counters["no_room"] += statuses.count(Status.NO_ROOM)
        return statuses

    def get(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        """See `Store.get`."""
        environment = self._environment or self._attach()
        if environment is None:
            return [Status.MISS] * len(keys)
        try:
            with environment.read() as txn:
                return [self._get(environment, txn, key, pieces) for key, pieces in zip(keys, buffers, strict=True)]
        except _FAILURES as error:
            return self._failed("get", error, len(keys))

    def remove(self, keys: Sequence[StoreKey]) -> list[Status]:
        """See `Store.remove`."""
        environment = self._environment or self._attach()
        if environment is None:
            return [Status.MISS] * len(keys)
        digests = [key.digest for key in keys]
        try:
            dropped = set(self._drop(environment, digests))
        except _FAILURES as error:
            return self._failed("remove", error, len(keys))
        statuses = []
        for digest in digests:
            statuses.append(Status.OK if digest in dropped else Status.MISS)
            dropped.discard(digest)
        return statuses

    def clear(self, namespace: str | None = None, salt: str | None = None) -> int:
        """See `Store.clear`."""
        environment = self._environment or self._attach()
        if environment is None:
            return 0
        try:
            chosen = []
            with environment.read() as txn, txn.cursor(db=environment.objects) as cursor:
                for digest, value in cursor:
                    _, found_namespace, found_salt, *_ = Record.unpack(value).key_text.decode("ascii").split(":")
                    if namespace in (None, found_namespace) and salt in (None, found_salt):
                        chosen.append(bytes(digest))
            return len(self._drop(environment, chosen))
        except _FAILURES as error:
            self._failed("clear", error, 1)
            raise EngineError(f"the embedded store could not be emptied: {error}") from error

    def touch(self, keys: Sequence[StoreKey]) -> None:
        """See `Store.touch`; written with the next put, or within a sync interval."""
        if not keys:
            return
        self._touched.append(tuple(key.digest for key in keys))
        if sum(map(len, self._touched)) > _FLUSH_KEYS:
            self.flush()

    def register(self, buffer: memoryview) -> None:
        """Need nothing announced."""

    def stats(self) -> dict[str, int | float]:
        """See `Store.stats`; `evicted_*` and `moved_aside` count over the life of the store."""
        found: dict[str, int | float] = dict(self._counters)
        environment = self._environment
        if environment is None:
            return found
        try:
            with environment.read() as txn:
                totals = Totals.unpack(txn.get(TOTALS_KEY) or Totals().pack())
        except _FAILURES as error:
            self._failed("stats", error, 1)
            return found
        return found | {
            "objects": totals.num_objects,
            "used_bytes": totals.used_bytes,
            "capacity_bytes": totals.budget_bytes,
            "reserved_bytes": environment.map_bytes,
            "evicted_objects": totals.evicted_objects,
            "evicted_bytes": totals.evicted_bytes,
            "moved_aside": totals.moved_aside,
            **environment.counters,
        }

    def flush(self) -> None:
        """Write the recency notes that `touch` has taken."""
        environment = self._environment
        if environment is None or not self._touched:
            return
        try:
            with environment.write() as txn:
                catalog = Catalog(environment, txn)
                self._write_touched(catalog)
                catalog.save()
        except _FAILURES as error:
            self._failed("touch", error, 1)

    def close(self) -> None:
        """See `Store.close`."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self.flush()
            environment, self._environment = self._environment, None
            if environment is not None:
                environment.release(self.flush)

    @property
    def environment(self) -> Environment | None:
        """The open file; None while the disk has no room for one."""
        return self._environment

    def _attach(self) -> Environment | None:
        """Open the files if another process has found room for them since."""
        return self._open() if self._folder.has_files() else None

    def _open(self) -> Environment | None:
        """Open the files unless the disk is too full for them; tried again at each put."""
        with self._closing:
            if self._environment is None and not self._closed:
                try:
                    self._environment = self._open_again()
                    self._environment.add_chore(self.flush)
                except _FAILURES as error:
                    self._failed("open", error, 1)
            return self._environment

    def _next_tick(self, environment: Environment) -> int:
        """Write the recency notes first: what was used before this call is older than what it puts."""

        def take() -> int:
            with environment.write() as txn:
                catalog = Catalog(environment, txn)
                self._write_touched(catalog)
                tick = catalog.take_tick()
                catalog.save()
                return tick

        return _relieved(environment, take)

    def _put(self, environment: Environment, batch: Sequence[_Put], tick: int) -> None:
        """Put one batch, half by half where the file is too full of pages that cannot be reused yet."""
        for attempt in range(2):
            try:
                self._make_room(environment, batch, tick)
                self._write(environment, batch, tick)
            except lmdb.MapFullError:
                for put in batch:
                    put.status = None
                if not attempt:
                    environment.relieve()
            else:
                return
        if len(batch) > 1:
            middle = len(batch) // 2
            self._put(environment, batch[:middle], tick)
            self._put(environment, batch[middle:], tick)

    def _make_room(self, environment: Environment, batch: Sequence[_Put], tick: int) -> None:
        """Evict what is older than this call as far as the batch needs it."""
        with environment.read() as reader:
            totals = Totals.unpack(reader.get(TOTALS_KEY) or Totals().pack())
            need = sum(
                charge_of(put.num_bytes) for put in batch if reader.get(put.key.digest, db=environment.objects) is None
            )
        if totals.used_bytes + need <= totals.budget_bytes:
            return
        with environment.write() as txn:
            catalog = Catalog(environment, txn)
            need = self._admit(catalog, batch, tick)
            catalog.evict(need, tick)
            catalog.save()

    def _admit(self, catalog: Catalog, batch: Sequence[_Put], tick: int) -> int:
        """Mark the objects for which evicting all that is older would not be enough; return what the others need."""
        kept = catalog.charge_since(tick)
        need = 0
        for put in batch:
            charge = charge_of(put.num_bytes)
            if catalog.find(put.key.digest) is not None:
                continue
            if kept + need + charge > catalog.totals.budget_bytes:
                put.status = Status.NO_ROOM
            else:
                need += charge
        return need

    def _write(self, environment: Environment, batch: Sequence[_Put], tick: int) -> None:
        """Write what is admitted and not there yet, in one transaction."""
        with environment.write() as txn:
            catalog = Catalog(environment, txn)
            for put in batch:
                if put.status is Status.NO_ROOM:
                    continue
                if catalog.find(put.key.digest) is not None:
                    put.status = Status.EXISTS
                elif catalog.totals.used_bytes + charge_of(put.num_bytes) > catalog.totals.budget_bytes:
                    put.status = Status.NO_ROOM  # another process has taken the room that was made
                else:
                    catalog.add(put.key, put.buffers, put.num_bytes, tick, self._scratch)
                    put.status = Status.OK
            catalog.save()
        stored = [put.num_bytes for put in batch if put.status is Status.OK]
        self._counters["put_objects"] += len(stored)
        self._counters["put_bytes"] += sum(stored)

    def _get(
        self, environment: Environment, txn: "lmdb.Transaction[memoryview]", key: StoreKey, buffers: Buffers
    ) -> Status:
        value = txn.get(key.digest, db=environment.objects)
        if value is None:
            return Status.MISS
        record = Record.unpack(value)
        pieces = (
            txn.get(piece_key(number), db=environment.pieces)
            for number in range(record.first_piece, record.first_piece + record.num_pieces)
        )
        if record.num_bytes != num_buffer_bytes(buffers) or not scatter(pieces, buffers):
            self._counters["corrupt"] += 1
            return Status.CORRUPT
        self._counters["get_objects"] += 1
        self._counters["get_bytes"] += record.num_bytes
        return Status.OK

    def _drop(self, environment: Environment, digests: Sequence[bytes]) -> list[bytes]:
        """Remove objects in transactions of bounded size; return those that were there."""
        parts = [digests[start : start + _REMOVALS] for start in range(0, len(digests), _REMOVALS)]
        return [digest for part in parts for digest in _relieved(environment, partial(_drop, environment, part))]

    def _write_touched(self, catalog: Catalog) -> None:
        for _ in range(len(self._touched)):
            tick = catalog.take_tick()
            for digest in self._touched.popleft():
                catalog.use(digest, tick)

    def _failed(self, what: str, error: Exception, count: int) -> list[Status]:
        self._counters["errors"] += count
        logger.warning("the store's %s failed: %s", what, error)
        return [Status.ERROR] * count


def _relieved(environment: Environment, act: Callable[[], _Result]) -> _Result:
    """Do it; once more where the file was too full of pages that could not be reused yet."""
    try:
        return act()
    except lmdb.MapFullError:
        environment.relieve()
        return act()


def _drop(environment: Environment, digests: Sequence[bytes]) -> list[bytes]:
    """Remove objects in one transaction; return those that were there."""
    dropped: list[bytes] = []
    with environment.write() as txn:
        catalog = Catalog(environment, txn)
        for digest in digests:
            record = catalog.find(digest)
            if record is not None:
                catalog.drop(digest, record)
                dropped.append(digest)
        catalog.save()
    return dropped


def _batches(puts: Sequence[_Put]) -> Iterator[list[_Put]]:
    batch: list[_Put] = []
    size = 0
    for put in puts:
        if batch and size + put.num_bytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(put)
        size += put.num_bytes
    if batch:
        yield batch
