"""Waiting for a common prefix in flight: a prefix is computed once, also when its users arrive together."""

from collections.abc import Iterable, Sequence

from dalsegno.request import Request
from dalsegno.types import BlockHash

__all__ = ["PlannedBoundaries"]


class PlannedBoundaries:
    """The boundaries that running requests are going to keep a state at, by hash. Rebuilt every step."""

    def __init__(self, hash_block_size: int) -> None:
        """Start empty."""
        self._unit = hash_block_size
        self._hashes: dict[int, set[BlockHash]] = {}

    def add(self, request: Request, boundaries: Iterable[int]) -> None:
        """Note what a running request plans."""
        for boundary in boundaries:
            block_hash = request.block_hashes[boundary // self._unit - 1]
            self._hashes.setdefault(boundary, set()).add(block_hash)

    def longest(self, hit: int, hashes: Sequence[BlockHash], num_tokens: int) -> int:
        """The largest planned boundary on the chain `hashes` beyond `hit` and below the last of `num_tokens`, or 0."""
        return max(
            (b for b in self._hashes if hit < b < num_tokens and self.has(b, hashes[b // self._unit - 1])), default=0
        )

    def has(self, boundary: int, block_hash: BlockHash) -> bool:
        """Whether a running request plans to keep a state at this boundary of this chain."""
        return block_hash in self._hashes.get(boundary, ())
