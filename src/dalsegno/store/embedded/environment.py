"""An open store file: transactions, syncs, and who in this process shares it.

LMDB must not be opened twice in a process, so engines of one process get the same `Environment`. Nothing here knows
what the tables mean. Not to be used across a fork.

Invariant: whenever this process writes, a reader of it (the anchor) is held on a state no newer than the snapshot in
`synced`; so no page of that snapshot is written over.
"""

import contextlib
import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb

from dalsegno.errors import OptionError
from dalsegno.store.embedded.folder import MAX_READERS, NUM_TABLES, Folder, map_bytes
from dalsegno.store.embedded.records import Totals
from dalsegno.store.embedded.synced import boot_id, write_snapshot

__all__ = ["DEFAULT_STORE_BYTES", "TOTALS_KEY", "Environment", "open_environment"]

logger = logging.getLogger(__name__)

DEFAULT_STORE_BYTES = 2**32
"""Bound on the bytes of a new store unless another is asked for."""

TOTALS_KEY = b"totals"
_SERIAL_KEY = b"serial"

_DAMAGE = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError, lmdb.VersionMismatchError)

_shared: dict[tuple[int, int], "Environment"] = {}
_shared_lock = threading.RLock()


class Environment:
    """One open store file. Made by `open_environment`, let go of with `release`.

    Attributes:
        folder: where it is.
        objects: table of records by key digest.
        pieces: table of bytes by piece number.
        recency: table of recency keys.
        writing: held by who writes, so that threads of this process queue here.
        counters: of this process.
    """

    def __init__(self, folder: Folder, users: int, map_size: int, sync_interval_s: float) -> None:
        """Open the files; `users` is the descriptor that counts this process as a user.

        Raises:
            lmdb.Error: the file is no sound LMDB file.
        """
        self.folder = folder
        self._users = users
        self._interval = sync_interval_s
        self._env = lmdb.open(
            str(folder.objects),
            subdir=False,
            map_size=map_size,
            max_dbs=NUM_TABLES,
            max_readers=MAX_READERS,
            max_spare_txns=8,
            mode=0o600,
            writemap=True,
            meminit=False,
            sync=False,
            metasync=False,
        )
        try:
            self._env.reader_check()
            self.objects, self.pieces, self.recency = (
                self._env.open_db(name) for name in (b"objects", b"pieces", b"recency")
            )
            with self._env.begin() as txn:
                Totals.unpack(txn.get(TOTALS_KEY) or Totals().pack())
        except BaseException:
            self._env.close()
            raise
        # By descriptor, for another process may move the files aside.
        self._objects_file = os.open(folder.objects, os.O_RDONLY)
        self._synced_file = os.open(folder.synced, os.O_RDWR)
        self.writing = threading.RLock()
        self.counters: Counter[str] = Counter(syncs=0, sync_errors=0)
        self._references = 0
        self._chores: list[Callable[[], None]] = []
        self._uses = 0
        self._closed = False
        self._idle = threading.Condition()
        self._anchor: lmdb.Transaction[bytes] | None = None
        self._anchor_id = -1
        self._has_written = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_synced, name="dalsegno-store-sync", daemon=True)

    @property
    def map_bytes(self) -> int:
        """Bytes of the data file, all reserved on the disk."""
        return self._env.info()["map_size"]

    def start(self) -> None:
        """Sync for the first time, and from then on by itself.

        Raises:
            OSError, lmdb.Error: the disk refuses.
        """
        try:
            self._sync()
        except BaseException:
            self._shut()
            raise
        self._thread.start()

    @contextlib.contextmanager
    def read(self) -> Iterator["lmdb.Transaction[memoryview]"]:
        """Enter a reading transaction; none of its memory may be used behind it.

        Raises:
            lmdb.Error: as LMDB, and where the environment has been closed.
        """
        with self._in_use(), self._env.begin(buffers=True) as txn:
            yield txn

    @contextlib.contextmanager
    def write(self) -> Iterator["lmdb.Transaction[bytes]"]:
        """Enter a writing transaction; committed unless the block raises.

        Raises:
            lmdb.MapFullError: too few pages can be used at the moment, see `relieve`.
            lmdb.Error: as LMDB, and where the environment has been closed.
            OSError: the disk refuses.
        """
        with self._in_use(), self.writing:
            if self._anchor is None:
                self._sync()
            self._has_written = True
            with self._env.begin(write=True) as txn:
                yield txn

    def sync(self, *, release: bool = True) -> None:
        """Write everything out and record it, where something has been written since; then let old pages be reused.

        LMDB keeps what the newest transaction has freed; with `release` an empty one is put behind it.

        On an error of the disk it is tried again the next time; until then old pages stay.
        """
        try:
            if release:
                self._release_newest()
            self._sync()
        except (OSError, lmdb.Error) as error:
            self.counters["sync_errors"] += 1
            logger.warning("the store %s was not synced: %s", self.folder.path, error)

    def relieve(self) -> None:
        """Make pages usable that were freed but are held by the anchor or by readers that have died."""
        self._env.reader_check()
        self.sync()

    def add_chore(self, chore: Callable[[], None]) -> None:
        """Have `chore` called every now and then, and before the file is closed."""
        with _shared_lock:
            self._chores.append(chore)

    def acquire(self) -> "Environment":
        """Count one more holder."""
        with _shared_lock:
            self._references += 1
        return self

    def release(self, chore: Callable[[], None]) -> None:
        """Let go, with the chore that was added; the last holder closes the file."""
        with _shared_lock:
            self._chores.remove(chore)
            self._references -= 1
            if self._references:
                return
            for key in [key for key, environment in _shared.items() if environment is self]:
                del _shared[key]
            self._close()

    def _close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.sync(release=False)
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: not self._uses)
        with self.folder.opening():
            self._shut()
            os.close(self._users)

    def _shut(self) -> None:
        self._drop_anchor()
        self._env.close()
        os.close(self._objects_file)
        os.close(self._synced_file)

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the file from being closed, and take note of damage."""
        with self._idle:
            if self._closed:
                raise lmdb.Error("the store is closed")
            self._uses += 1
        try:
            yield
        except _DAMAGE:
            self.folder.mark_damaged(self._objects_file)
            raise
        finally:
            with self._idle:
                self._uses -= 1
                self._idle.notify_all()

    def _sync(self) -> None:
        if self._anchor is not None and self._env.info()["last_txnid"] == self._anchor_id:
            return
        self._env.sync(True)  # most of the work, while others may write
        with self._in_use(), self.writing, self._env.begin(write=True):
            self._record()

    def _release_newest(self) -> None:
        if self._anchor is None:
            return
        with contextlib.suppress(lmdb.MapFullError), self._in_use(), self.writing, self._env.begin(write=True) as txn:
            serial = int.from_bytes(txn.get(_SERIAL_KEY) or b"", "big") + 1
            txn.put(_SERIAL_KEY, serial.to_bytes(8, "big"))

    def _record(self) -> None:
        """Under the write lock: sync, copy the meta pages, move the anchor here, in this order."""
        newest = self._env.info()["last_txnid"]
        anchor = self._env.begin()
        try:
            self._env.sync(True)
            meta_pages = os.pread(self._objects_file, 2 * self._env.stat()["psize"], 0)
            write_snapshot(self._synced_file, boot_id(), meta_pages)
        except BaseException:
            anchor.abort()
            raise
        self._drop_anchor()
        self._anchor, self._anchor_id = anchor, newest
        self.counters["syncs"] += 1

    def _drop_anchor(self) -> None:
        if self._anchor is not None:
            self._anchor.abort()
            self._anchor = None

    def _keep_synced(self) -> None:
        while not self._stop.wait(self._interval):
            for chore in tuple(self._chores):
                chore()
            with self.writing:
                is_idle, self._has_written = not self._has_written, False
            # Whoever has not written adds nothing, or idle processes would keep each other busy.
            self.sync(release=not is_idle)
            with self.writing:
                # Of others' writes too; but who does not write keeps no pages from those who do.
                if is_idle and not self._has_written:
                    self._drop_anchor()


def open_environment(path: Path, num_bytes: int | None, sync_interval_s: float, *, create: bool) -> Environment:
    """Open the store in a folder, or make one; a store that does not open is moved aside and a new one made.

    Args:
        path: the folder.
        num_bytes: the bound, None for the one the store has; as long as others have it open, theirs holds.
        sync_interval_s: seconds between syncs.
        create: False refuses a folder that is no store.

    Raises:
        OptionError: the folder is something else, or not accessible; without `create` also if the store does not open.
        OSError, lmdb.Error: the disk is full.
    """
    folder = Folder(path)
    folder.check(create=create)
    with _shared_lock:
        status = path.stat()
        key = (status.st_dev, status.st_ino)
        if key not in _shared:
            with folder.opening():
                _shared[key] = _open(folder, num_bytes, sync_interval_s, create=create)
        return _shared[key].acquire()


def _open(folder: Folder, num_bytes: int | None, sync_interval_s: float, *, create: bool) -> Environment:
    users, alone = folder.join()
    try:
        environment = None
        moved = False
        if folder.is_sound():
            with contextlib.suppress(lmdb.Error):
                environment = _open_existing(folder, users, num_bytes if alone else None, sync_interval_s)
        if environment is None:
            if not create:
                raise OptionError(f"the store in {folder.path} is damaged; an engine that uses it will start a new one")
            moved = folder.has_files()
            if moved:
                logger.warning("the store in %s does not open: moved to %s", folder.path, folder.path / "aside")
                folder.move_aside()
            budget = folder.create(_default_budget(folder.path) if num_bytes is None else num_bytes)
            folder.reserve()
            environment = Environment(folder, users, map_bytes(budget), sync_interval_s)
            _set_budget(environment, budget, moved_aside=int(moved))
        environment.start()
    except BaseException:
        os.close(users)
        raise
    return environment


def _default_budget(path: Path) -> int:
    """The default bound, or what takes a quarter of the disk's free space where that is less."""
    return max(2**20, min(DEFAULT_STORE_BYTES, shutil.disk_usage(path).free // 4))


def _open_existing(folder: Folder, users: int, num_bytes: int | None, sync_interval_s: float) -> Environment:
    """Open sound files; with `num_bytes` change the bound to it as far as the disk allows."""
    if folder.restore():
        logger.warning("the machine has started anew: %s is as it was at its last sync", folder.path)
    size = folder.objects.stat().st_size
    budget = num_bytes
    if budget is not None and map_bytes(budget) > size:
        try:
            budget = folder.grow(budget)
        except OSError as error:
            logger.warning("the store %s cannot grow: %s", folder.path, error)
            budget = None
    folder.reserve()
    environment = Environment(folder, users, folder.objects.stat().st_size, sync_interval_s)
    if budget is not None:
        _set_budget(environment, budget)
    return environment


def _set_budget(environment: Environment, budget: int, *, moved_aside: int = 0) -> None:
    with environment.write() as txn:
        totals = Totals.unpack(txn.get(TOTALS_KEY) or Totals().pack())
        totals.budget_bytes = budget
        totals.moved_aside += moved_aside
        txn.put(TOTALS_KEY, totals.pack())
