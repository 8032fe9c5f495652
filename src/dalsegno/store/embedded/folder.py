"""The folder of an embedded store: its files, their space on the disk, and what happens to one that is damaged.

format.json        format, and how many bytes the data file has
objects.lmdb       the data file; its whole space is reserved, for a write through the map cannot fail
objects.lmdb-lock  LMDB's readers
synced             see `synced`
opening, users     locks (flock): one process opens at a time; who has it open
aside              the last store that did not open
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import lmdb

from dalsegno.errors import OptionError
from dalsegno.store.embedded.synced import boot_id, create_slots, read_snapshot

__all__ = ["FORMAT", "MAX_READERS", "NUM_TABLES", "Folder", "map_bytes"]

logger = logging.getLogger(__name__)

FORMAT = 1
"""Version of files and tables; a store of another one is moved aside."""
NUM_TABLES = 3
MAX_READERS = 500

_LOCK_FILE_BYTES = 2**16
_MIN_HEADROOM_BYTES = 2**23
_MIN_BUDGET_BYTES = 2**20
_FILES = ("format.json", "objects.lmdb", "objects.lmdb-lock", "synced", "damaged")
_OTHERS = ("opening", "users", "aside", "objects.new", "format.new")


class Folder:
    """Paths and life of the files; all methods but `check` and `opening` are called by who holds `opening`."""

    def __init__(self, path: Path) -> None:
        """Name the folder; nothing is touched."""
        self.path = path
        self.objects = path / "objects.lmdb"
        self.synced = path / "synced"
        self._format = path / "format.json"
        self._damaged = path / "damaged"

    def check(self, *, create: bool) -> None:
        """Make sure that this is a store or, with `create`, may become one; makes the folder itself.

        Raises:
            OptionError: it is something else, or not accessible.
            OSError: the disk is full.
        """
        try:
            if create and not self.path.exists():
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            names = {entry.name for entry in self.path.iterdir()}
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            raise OptionError(f"{self.path} cannot be opened as a store: {error.strerror}") from error
        if not create and self._format.name not in names:
            raise OptionError(f"{self.path} is no store: it has no {self._format.name}")
        if foreign := sorted(names - {*_FILES, *_OTHERS}):
            raise OptionError(f"{self.path} is neither a store nor empty: it holds {foreign[0]!r}")

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Wait until no other process opens or closes this store."""
        descriptor = os.open(self.path / "opening", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def join(self) -> tuple[int, bool]:
        """Count as a user until the returned descriptor is closed; and whether there is no other one."""
        descriptor = os.open(self.path / "users", os.O_RDWR | os.O_CREAT, 0o600)
        alone = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            alone = False
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return descriptor, alone

    def is_sound(self) -> bool:
        """Whether the files look like a store of this format, as far as can be told without opening it."""
        try:
            fields = json.loads(self._format.read_text(encoding="ascii"))
            reserved = fields["reserved_bytes"] if fields["format"] == FORMAT else -1
            sound = self.synced.exists() and not self._damaged.exists()
            return sound and 0 <= reserved <= self.objects.stat().st_size
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def has_files(self) -> bool:
        """Whether there is a store, sound or not; what a creation has left unfinished does not count."""
        return self._format.exists()

    def mark_damaged(self, descriptor: int) -> None:
        """Have the next one that opens this store move it aside, if it still has this data file."""
        with contextlib.suppress(OSError):
            if os.path.samestat(self.objects.stat(), os.fstat(descriptor)):
                self._damaged.touch()

    def move_aside(self) -> None:
        """Move the files out of the way, in place of those moved before."""
        aside = self.path / "aside"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(mode=0o700)
        for name in _FILES:
            with contextlib.suppress(FileNotFoundError):
                (self.path / name).rename(aside / name)

    def create(self, budget: int) -> int:
        """Make an empty store; return the budget that fits on the disk, `budget` or less.

        Raises:
            OSError: the disk is full.
        """
        for name in (*_FILES, "objects.new"):
            (self.path / name).unlink(missing_ok=True)
        fresh = self.path / "objects.new"
        # An empty environment first, written by calls and without a lock file: a write through a map cannot say "full".
        lmdb.open(str(fresh), subdir=False, map_size=2**16, mode=0o600, lock=False).close()
        create_slots(self.synced)
        budget = self._reserve_most(fresh, budget)
        fresh.rename(self.objects)
        self._write_format()
        return budget

    def grow(self, budget: int) -> int:
        """Reserve what `budget` needs beyond what is there; return the budget that fits now, at most `budget`."""
        fits = self._reserve_most(self.objects, budget)
        self._write_format()
        return fits

    def reserve(self) -> None:
        """Make sure of the files' space again: a copy of the folder may have lost it.

        Raises:
            OSError: the disk is full.
        """
        _reserve(self.objects, self.objects.stat().st_size)
        _reserve(self.path / "objects.lmdb-lock", _LOCK_FILE_BYTES)

    def restore(self) -> bool:
        """After a start of the machine, go back to what was on the disk for sure; whether that was so.

        Nobody has the store open, or this start of the machine would be on record.
        """
        with self.synced.open("rb") as file:
            snapshot = read_snapshot(file.fileno())
        if snapshot is None or snapshot.boot == boot_id():
            return False
        with self.objects.open("r+b") as file:
            file.write(snapshot.meta_pages)
            file.flush()
            os.fsync(file.fileno())
        return True

    def _reserve_most(self, file: Path, budget: int) -> int:
        """Reserve space for a budget, or for the half of it as often as it takes."""
        while True:
            try:
                _reserve(file, map_bytes(budget))
            except OSError as error:
                if error.errno != errno.ENOSPC or budget // 2 < _MIN_BUDGET_BYTES:
                    raise
                budget //= 2
                logger.warning("the disk of %s is too full: the store gets %d bytes", self.path, budget)
            else:
                return budget

    def _write_format(self) -> None:
        fresh = self.path / "format.new"
        fields = {"format": FORMAT, "reserved_bytes": self.objects.stat().st_size}
        with fresh.open("w", encoding="ascii") as file:
            json.dump(fields, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(self._format)


def map_bytes(budget: int) -> int:
    """Return the size of the data file: what is freed can be written again only after the next sync."""
    size = max(budget * 3 // 2, budget + _MIN_HEADROOM_BYTES)
    return -(-size // 2**16) * 2**16


def _reserve(file: Path, num_bytes: int) -> None:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    size = os.fstat(descriptor).st_size
    try:
        if num_bytes:
            os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError:
        os.ftruncate(descriptor, size)
        raise
    finally:
        os.close(descriptor)
