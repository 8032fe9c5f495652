"""Names of stored objects: everything that decides whether two engines may share bytes is in them.

A key has a namespace (what is the same for all objects of one rank of one engine), the tag of its key domain, the part
of the cache it holds, the boundary and the hash of the prefix that ends there. Encodings are tagged and
length-prefixed; nothing depends on the process (no pickle, no PYTHONHASHSEED).
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dalsegno.types import BlockHash

__all__ = ["KEY_FORMAT", "MAX_KEY_BYTES", "StoreKey", "namespace_digest", "salt_tag"]

KEY_FORMAT = 1
"""Raised whenever the meaning of a key or of the bytes behind it changes."""

MAX_KEY_BYTES = 200
"""Most bytes of a key's text."""

_NAMESPACE_BYTES = 16
_TAG_BYTES = 8
_HASH_BYTES = 32
_PART = re.compile(r"[A-Za-z0-9_.+-]{1,48}")


@dataclass(frozen=True, slots=True)
class StoreKey:
    """The name of one stored object.

    Attributes:
        namespace: 32 hex digits, from `namespace_digest`.
        salt: 16 hex digits, from `salt_tag`.
        part: which group of the cache, such as "attention"; 1 to 48 letters, digits and `_.+-`.
        boundary: tokens of the prefix, at least 0.
        block_hash: the chained hash of the prefix, 32 bytes.
        digest: 32 bytes that stand for the whole key.
    """

    namespace: str
    salt: str
    part: str
    boundary: int
    block_hash: BlockHash
    digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the parts and compute the digest."""
        assert len(self.namespace) == 2 * _NAMESPACE_BYTES, f"a namespace has 32 hex digits, got {self.namespace!r}"
        assert len(self.salt) == 2 * _TAG_BYTES, f"a salt tag has 16 hex digits, got {self.salt!r}"
        assert _PART.fullmatch(self.part), f"a part is named by 1 to 48 letters, digits and _.+-, got {self.part!r}"
        assert 0 <= self.boundary < 2**63, f"boundary {self.boundary} is out of range"
        assert len(self.block_hash) == _HASH_BYTES, f"a block hash has 32 bytes, got {len(self.block_hash)}"
        object.__setattr__(self, "digest", hashlib.sha256(self.text.encode("ascii")).digest())

    @property
    def text(self) -> str:
        """The canonical text: printable ASCII, at most `MAX_KEY_BYTES`, without spaces."""
        return f"dalsegno:{self.namespace}:{self.salt}:{self.part}:{self.boundary}:{self.block_hash.hex()}"

    @classmethod
    def from_text(cls, text: str) -> "StoreKey":
        """Return the key with this canonical text.

        Raises:
            ValueError: it is no key's text.
        """
        try:
            _, namespace, salt, part, boundary, block_hash = text.split(":")
            key = cls(namespace, salt, part, int(boundary), BlockHash(bytes.fromhex(block_hash)))
        except (ValueError, AssertionError) as error:
            raise ValueError(f"not the text of a store key: {text!r}") from error
        if key.text != text:
            raise ValueError(f"not the canonical text of a store key: {text!r}")
        return key


def namespace_digest(items: Mapping[str, str | int]) -> str:
    """Return the namespace of engines that agree in all `items`, whatever the order: 32 hex digits.

    The key format is part of it; the integer 1 and the string "1" differ.
    """
    digest = hashlib.sha256()
    for name, value in sorted({"key_format": KEY_FORMAT, **items}.items()):
        digest.update(_field(b"n", name))
        digest.update(_field(b"i", str(value)) if isinstance(value, int) else _field(b"s", value))
    return digest.digest()[:_NAMESPACE_BYTES].hex()


def salt_tag(cache_salt: str | None, adapter: str | None = None) -> str:
    """Return the tag of a key domain: 16 hex digits; salt "x" and adapter "x" are different domains.

    The tag only selects (`clear` of one salt). What keeps domains apart is the block hash, whose root holds both.
    """
    digest = hashlib.sha256()
    for name, value in (("salt", cache_salt), ("adapter", adapter)):
        digest.update(_field(b"n", name))
        digest.update(b"-" if value is None else _field(b"s", value))
    return digest.digest()[:_TAG_BYTES].hex()


def _field(tag: bytes, value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass")
    return tag + len(encoded).to_bytes(8, "little") + encoded
