"""Hashes of recently seen prompts, reused by the prompt that extends one (the next chat turn).

A prompt is found again by its first unit's hash and compared at C speed; equal tokens in the same key domain have equal
hashes, so nothing here can change a result, only the time it takes.
"""

from array import array
from collections import OrderedDict

from dalsegno.hashing.block_hash import extend_block_hashes
from dalsegno.types import BlockHash

__all__ = ["RecentHashes"]

_BUCKET_SIZE = 4
_DIGEST_BYTES = 32 + 33 + 8


class RecentHashes:
    """A bounded memory of prompts and their hashes. Used on the engine thread only."""

    def __init__(self, hash_block_size: int, max_bytes: int = 64 << 20) -> None:
        """Remember prompts of about `max_bytes` bytes together; the least recently used first unit goes first."""
        self._unit = hash_block_size
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._buckets: OrderedDict[BlockHash, list[tuple[array[int], list[BlockHash]]]] = OrderedDict()

    def hashes(self, root: BlockHash, token_ids: "array[int]") -> list[BlockHash]:
        """Return the hashes of all full units of `token_ids`, a list of the caller's own, and remember them."""
        hashes: list[BlockHash] = []
        extend_block_hashes(root, hashes, token_ids[: self._unit], self._unit)
        if not hashes:
            return hashes
        key = hashes[0]
        bucket = self._buckets.get(key, [])
        shared, source = max(
            ((self._common_units(token_ids, known), known_hashes) for known, known_hashes in bucket),
            key=lambda found: found[0],
            default=(0, []),
        )
        hashes += source[1:shared]
        extend_block_hashes(root, hashes, token_ids, self._unit)
        self._remember(key, token_ids, hashes)
        return hashes

    def _common_units(self, left: "array[int]", right: "array[int]") -> int:
        """Number of full units both prompts start with, by bisection over whole-range compares."""
        low, high = 0, min(len(left), len(right)) // self._unit
        a, b = memoryview(left).cast("B"), memoryview(right).cast("B")
        width = 4 * self._unit
        if a[: high * width] == b[: high * width]:
            return high
        while low + 1 < high:
            middle = (low + high) // 2
            if a[low * width : middle * width] == b[low * width : middle * width]:
                low = middle
            else:
                high = middle
        return low

    def _remember(self, key: BlockHash, token_ids: "array[int]", hashes: list[BlockHash]) -> None:
        kept = token_ids[: len(hashes) * self._unit]
        old = self._buckets.pop(key, [])
        # A prompt that the new one extends adds nothing.
        bucket = [(known, h) for known, h in old if len(h) > len(hashes) or hashes[len(h) - 1] != h[-1]]
        bucket = [(kept, list(hashes)), *bucket][:_BUCKET_SIZE]
        self._buckets[key] = bucket
        self._num_bytes += _num_bytes(bucket) - _num_bytes(old)
        while self._num_bytes > self._max_bytes and len(self._buckets) > 1:
            _, evicted = self._buckets.popitem(last=False)
            self._num_bytes -= _num_bytes(evicted)


def _num_bytes(bucket: list[tuple["array[int]", list[BlockHash]]]) -> int:
    """Bytes of the tokens, and of the digests with their object headers and list slots."""
    return sum(token_ids.itemsize * len(token_ids) + _DIGEST_BYTES * len(hashes) for token_ids, hashes in bucket)
