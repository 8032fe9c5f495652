"""What is on the disk for sure, so that a power cut costs the last seconds and nothing else.

LMDB writes through a shared map without ordering. A kill loses nothing, for the kernel has the pages; after a power cut
the two meta pages may be newer than what they point to. So whenever everything has been written out, the meta pages are
copied into a file of their own, and a reader that is held open keeps LMDB from reusing a page of that snapshot. After
the machine has started anew, the copied meta pages are put back, and the file is the snapshot again.

The file has two slots of fixed size that are written in turn, each with a checksum: a torn write spoils one of them.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import xxhash

__all__ = ["Snapshot", "boot_id", "create_slots", "read_snapshot", "write_snapshot"]

_SLOT_BYTES = 2**17
_HEAD = struct.Struct("<8sQ64sI16s")
_MAGIC = b"DALSYNC1"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The meta pages of a state that is on the disk.

    Attributes:
        serial: counts the snapshots of one store.
        boot: since which start of the machine the file has been written to, see `boot_id`.
        meta_pages: the first two pages of the data file.
    """

    serial: int
    boot: str
    meta_pages: bytes


def boot_id() -> str:
    """Return what tells one start of this machine from the next; the same every time where the system does not say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def create_slots(path: Path) -> None:
    """Create the file, with its space on the disk."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 2 * _SLOT_BYTES)


def read_snapshot(descriptor: int) -> Snapshot | None:
    """Return the newest snapshot of an open file whose checksum is right, None if there is none."""
    content = os.pread(descriptor, 2 * _SLOT_BYTES, 0)
    found = [_unpack(content[start : start + _SLOT_BYTES]) for start in (0, _SLOT_BYTES)]
    return max((snapshot for snapshot in found if snapshot is not None), key=lambda s: s.serial, default=None)


def write_snapshot(descriptor: int, boot: str, meta_pages: bytes) -> None:
    """Replace the older snapshot, on the disk when this returns. One writer at a time.

    Raises:
        OSError: it could not be written; the newest one before still counts.
    """
    newest = read_snapshot(descriptor)
    serial = 1 if newest is None else newest.serial + 1
    fields = (_MAGIC, serial, boot.encode("ascii")[:64], len(meta_pages))
    checksum = xxhash.xxh3_128_digest(_HEAD.pack(*fields, b"") + meta_pages)
    os.pwrite(descriptor, _HEAD.pack(*fields, checksum) + meta_pages, serial % 2 * _SLOT_BYTES)
    os.fsync(descriptor)


def _unpack(slot: bytes) -> Snapshot | None:
    if len(slot) < _HEAD.size:
        return None
    magic, serial, boot, size, checksum = _HEAD.unpack_from(slot)
    meta_pages = slot[_HEAD.size : _HEAD.size + size]
    whole = _HEAD.pack(magic, serial, boot, size, b"") + meta_pages
    if magic != _MAGIC or len(meta_pages) != size or xxhash.xxh3_128_digest(whole) != checksum:
        return None
    return Snapshot(serial, boot.rstrip(b"\0").decode("ascii", "replace"), meta_pages)
