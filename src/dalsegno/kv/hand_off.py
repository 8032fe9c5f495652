"""Hand-offs: a boundary with the exact blocks of every group it needs, each pinned, on its way to a connector.

A hand-off's blocks are those the index vouches for under the boundary's hashes, so their bytes cannot change. None is
made, and nothing is pinned, when nothing will save it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from dalsegno.kv.index import PrefixIndex
from dalsegno.kv.pool import SlabPool
from dalsegno.prefix.resolve import window_first_block
from dalsegno.request import Request
from dalsegno.types import NULL_BLOCK, BlockHash

__all__ = ["HandOffEntry", "HandOffSink", "HandOffs"]

HandOffEntry = tuple[int, int, int]
"""(group, block, boundary)."""


class HandOffSink(Protocol):
    """What the KV manager asks of a bound connector. Both calls are pure and made on the engine thread."""

    def saves(self, request: Request) -> bool:
        """Whether anything of this request will be stored."""
        ...

    def is_known_stored(self, group: int, block: int) -> bool:
        """Whether a store has answered OK or EXISTS for this published block."""
        ...


class HandOffs:
    """Makes hand-offs and counts their pins until the connector gives them back."""

    def __init__(self, pool: SlabPool, index: PrefixIndex) -> None:
        """Pin in `pool` what `index` vouches for; makes nothing until a sink is bound."""
        self._pool = pool
        self._index = index
        self.sink: HandOffSink | None = None
        self.pins: Counter[tuple[int, int]] = Counter()

    def wanted(self, request: Request) -> bool:
        """Whether a hand-off of this request would be saved by anybody."""
        return self.sink is not None and self.sink.saves(request)

    def make(self, hashes: Sequence[BlockHash], boundary: int, handed_off: int) -> list[HandOffEntry]:
        """Collect and pin what restores `boundary`; full blocks below `handed_off` tokens were handed off before.

        Returns:
            The entries, full blocks first and the state last, or nothing when some group does not vouch for it.
        """
        assert self.sink is not None, "a hand-off without a connector"
        entries: list[HandOffEntry] = []
        for group in self._index.groups:
            if group.prefix == "none":
                continue
            ends = [boundary]
            if not group.is_state:
                size = group.block_size
                first = handed_off // size
                if group.window is not None:
                    first = max(first, window_first_block(boundary, group.window, size))
                ends = [min((block + 1) * size, boundary) for block in range(first, -(-boundary // size))]
            for end in ends:
                block = self._index.find(group.group_id, hashes[end // self._index.unit - 1])
                if block == NULL_BLOCK:
                    return []
                if not self.sink.is_known_stored(group.group_id, block):
                    entries.append((group.group_id, block, end))
        entries.sort(key=lambda entry: self._index.groups[entry[0]].is_state)
        for group_id, block, _ in entries:
            self._pool.pin(group_id, block)
            self.pins[group_id, block] += 1
        return entries

    def release(self, entries: Iterable[HandOffEntry]) -> None:
        """Give pins back, one per entry: the connector is done with the blocks."""
        for group_id, block, _ in entries:
            assert self.pins[group_id, block] > 0, f"block {block} of group {group_id} has no hand-off pin"
            self.pins[group_id, block] -= 1
            if not self.pins[group_id, block]:
                del self.pins[group_id, block]
            self._pool.unpin(group_id, block)
