"""Objects: a payload behind a header that says what it is, so that wrong bytes are noticed whatever the store does.

The header is of fixed size and little-endian; docs/store-format.md has the table. The checksum is taken over the
payload in the caller's buffers, without gathering them.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from dalsegno.store.base import Buffers, Status, Store, flat_view, num_buffer_bytes
from dalsegno.store.keys import StoreKey

__all__ = [
    "HEADER_BYTES",
    "OBJECT_VERSION",
    "Header",
    "StoreObject",
    "get_objects",
    "pack_header",
    "payload_checksum",
    "put_objects",
    "unpack_header",
]

OBJECT_VERSION = 1
"""Version of the header and of what follows it; a reader takes other versions for misses."""

_MAGIC = b"DALSEGNO"
_LAYOUT = struct.Struct("<8sHHI32sQQQQ16s")
HEADER_BYTES = _LAYOUT.size
"""Bytes of a header, in front of the payload."""


@dataclass(frozen=True, slots=True)
class StoreObject:
    """One object in memory: what is to be stored, or where it is to be read into.

    Attributes:
        key: its name; it holds the boundary.
        num_tokens: tokens whose bytes it holds; 1 for a state.
        parts: the payload, piece by piece; writable where it is read into. Writer and reader cut it alike.
    """

    key: StoreKey
    num_tokens: int
    parts: Buffers


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says; `lengths` is a digest of the sizes of the parts."""

    version: int
    key_digest: bytes
    boundary: int
    num_tokens: int
    num_parts: int
    payload_bytes: int
    lengths: int
    checksum: bytes


def put_objects(store: Store, objects: Sequence[StoreObject]) -> list[Status]:
    """Put objects with their headers; one result each, as `Store.put`."""
    buffers = [
        [memoryview(pack_header(item, payload_checksum(item.parts))), *map(flat_view, item.parts)] for item in objects
    ]
    return store.put([item.key for item in objects], buffers)


def get_objects(store: Store, objects: Sequence[StoreObject]) -> list[Status]:
    """Read objects into their parts and verify them: OK, MISS, CORRUPT or ERROR.

    OK is returned only if header, length and checksum are those of this very object; otherwise what the parts hold is
    undefined. An object of another version is a MISS.
    """
    headers = [bytearray(HEADER_BYTES) for _ in objects]
    buffers = [[memoryview(header), *map(flat_view, item.parts)] for header, item in zip(headers, objects, strict=True)]
    statuses = store.get([item.key for item in objects], buffers)
    return [
        _verify(item, header) if status is Status.OK else status
        for item, header, status in zip(objects, headers, statuses, strict=True)
    ]


def _verify(item: StoreObject, header: bytearray) -> Status:
    found = unpack_header(header)
    if found is None:
        return Status.CORRUPT
    if found.version != OBJECT_VERSION:
        return Status.MISS
    checksum = payload_checksum(item.parts)
    return Status.OK if pack_header(item, checksum) == bytes(header) else Status.CORRUPT


def pack_header(item: StoreObject, checksum: bytes) -> bytes:
    """Return the header of an object whose payload has this checksum."""
    return _LAYOUT.pack(
        _MAGIC,
        OBJECT_VERSION,
        HEADER_BYTES,
        len(item.parts),
        item.key.digest,
        item.key.boundary,
        item.num_tokens,
        num_buffer_bytes(item.parts),
        _lengths_digest(item.parts),
        checksum,
    )


def unpack_header(header: bytes | bytearray | memoryview) -> Header | None:
    """Return what the first `HEADER_BYTES` of an object say, None if they are no header."""
    if len(header) < HEADER_BYTES:
        return None
    magic, version, size, num_parts, digest, boundary, num_tokens, payload, lengths, checksum = _LAYOUT.unpack_from(
        header
    )
    if magic != _MAGIC or (version == OBJECT_VERSION and size != HEADER_BYTES):
        return None
    return Header(version, digest, boundary, num_tokens, num_parts, payload, lengths, checksum)


def payload_checksum(parts: Buffers) -> bytes:
    """Return the xxh3-128 of the parts' bytes one after the other: 16 bytes, big-endian as the canonical form."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(flat_view(part))
    return state.digest()


def _lengths_digest(parts: Buffers) -> int:
    lengths = [part.nbytes for part in parts]
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(lengths)}Q", *lengths))
