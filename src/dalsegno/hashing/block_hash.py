"""Chained block hashes: a hash names the whole prefix that ends at its boundary.

    h(0) = SHA-256(canonical encoding of format, H, salt, adapter)
    h(i) = SHA-256(h(i-1) ‖ tokens [(i-1)·H, i·H) as little-endian u32)

Only full units are hashed. The encoding is tagged and length-prefixed, so no two key domains share a root, and nothing
depends on the process (no pickle, no PYTHONHASHSEED).
"""

import hashlib
import sys
from array import array
from collections.abc import Iterable

from dalsegno.types import BlockHash

__all__ = ["HASH_FORMAT", "extend_block_hashes", "root_hash", "to_token_array"]

HASH_FORMAT = 1
"""Raised whenever the meaning of a hash changes."""

assert array("I").itemsize == 4, "token ids are hashed as 32-bit words"


def to_token_array(token_ids: Iterable[int]) -> "array[int]":
    """Convert token ids to a u32 buffer; this happens once per prompt, at the door.

    Raises:
        OverflowError: an id is negative or does not fit 32 bits.
        TypeError: an id is not an integer.
    """
    return array("I", token_ids)


def root_hash(hash_block_size: int, salt: str | None = None, adapter: str | None = None) -> BlockHash:
    """Return h(0), the hash of zero tokens in a key domain; salt "x" and adapter "x" are different domains."""
    digest = hashlib.sha256()
    fields = (("format", str(HASH_FORMAT)), ("unit", str(hash_block_size)), ("salt", salt), ("adapter", adapter))
    for tag, value in fields:
        digest.update(_field(tag.encode()))
        digest.update(b"\x00" if value is None else b"\x01" + _field(value.encode("utf-8", "surrogatepass")))
    return BlockHash(digest.digest())


def extend_block_hashes(
    root: BlockHash, hashes: list[BlockHash], token_ids: "array[int]", hash_block_size: int
) -> None:
    """Append the hashes of all full units of `token_ids` that `hashes` does not cover yet; modifies `hashes`."""
    first, last = len(hashes), len(token_ids) // hash_block_size
    if first >= last:
        return
    width = 4 * hash_block_size
    units = memoryview(_little_endian(token_ids[first * hash_block_size : last * hash_block_size])).cast("B")
    parent = hashes[-1] if hashes else root
    sha256 = hashlib.sha256
    for start in range(0, len(units), width):
        parent = BlockHash(sha256(parent + units[start : start + width]).digest())
        hashes.append(parent)


def _field(value: bytes) -> bytes:
    return len(value).to_bytes(8, "little") + value


def _little_endian(token_ids: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids
