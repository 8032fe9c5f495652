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

    def longer_than(self, hit: int, hashes: Sequence[BlockHash], num_tokens: int) -> bool:
        """Whether a planned boundary on the chain `hashes` lies beyond `hit` and below the last of `num_tokens`."""
        return any(
            hit < boundary < num_tokens and hashes[boundary // self._unit - 1] in planned
            for boundary, planned in self._hashes.items()
        )
