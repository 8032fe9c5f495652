"""What the tables of the embedded store hold: encodings, and what an object counts against the bound.

| table | key | value |
|---|---|---|
| objects | key digest | `Record` and the key's text |
| pieces | piece number, big-endian | up to `PIECE_BYTES` of an object |
| recency | tick, largest boundary first, key digest | nothing |
| (main) | "totals" | `Totals` |
"""

import struct
from dataclasses import dataclass, fields

__all__ = ["PIECE_BYTES", "Record", "Totals", "charge_of", "piece_key", "recency_key"]

_PAGE_BYTES = 4096
_PAGE_HEADER_BYTES = 16

PIECE_BYTES = 64 * _PAGE_BYTES - _PAGE_HEADER_BYTES
"""Bytes per piece. All allocations are at most this large and most exactly: that is what keeps free space usable."""

_RECORD_BYTES = 512
_RECORD = struct.Struct("<QQQQQ")
_TOTALS = struct.Struct("<8Q")
_MAX_BOUNDARY = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Record:
    """One stored object.

    Attributes:
        tick: when it was used last.
        boundary: tokens of its prefix.
        num_bytes: its size, header included.
        first_piece: number of its first piece; the others follow.
        num_pieces: how many there are.
        key_text: the full key.
    """

    tick: int
    boundary: int
    num_bytes: int
    first_piece: int
    num_pieces: int
    key_text: bytes

    def pack(self) -> bytes:
        """Return the table's value."""
        return _RECORD.pack(self.tick, self.boundary, self.num_bytes, self.first_piece, self.num_pieces) + self.key_text

    @classmethod
    def unpack(cls, value: memoryview | bytes) -> "Record":
        """Return the record that a value of the table holds; it keeps nothing of the value's memory."""
        tick, boundary, num_bytes, first_piece, num_pieces = _RECORD.unpack_from(value)
        return cls(tick, boundary, num_bytes, first_piece, num_pieces, bytes(value[_RECORD.size :]))


@dataclass(slots=True)
class Totals:
    """Sums over all objects, the next numbers, and counters that outlive processes."""

    num_objects: int = 0
    used_bytes: int = 0
    budget_bytes: int = 0
    next_tick: int = 1
    next_piece: int = 0
    evicted_objects: int = 0
    evicted_bytes: int = 0
    moved_aside: int = 0

    def pack(self) -> bytes:
        """Return the table's value."""
        return _TOTALS.pack(*(getattr(self, field.name) for field in fields(self)))

    @classmethod
    def unpack(cls, value: memoryview | bytes) -> "Totals":
        """Return the totals that the table's value holds."""
        return cls(*_TOTALS.unpack(value))


def charge_of(num_bytes: int) -> int:
    """Return what an object of `num_bytes` counts against the bound: whole pages, and its entries in the tables."""
    full, rest = divmod(num_bytes, PIECE_BYTES)
    pages = full * (PIECE_BYTES + _PAGE_HEADER_BYTES) // _PAGE_BYTES
    pages += -(-(rest + _PAGE_HEADER_BYTES) // _PAGE_BYTES) if rest else 0
    return pages * _PAGE_BYTES + _RECORD_BYTES


def piece_key(number: int) -> bytes:
    """Return the key of a piece."""
    return number.to_bytes(8, "big")


def recency_key(tick: int, boundary: int, digest: bytes) -> bytes:
    """Return the key that sorts objects by what is evicted first: the oldest, of those the longest prefix."""
    return tick.to_bytes(8, "big") + (_MAX_BOUNDARY - boundary).to_bytes(8, "big") + digest
