"""Which cached block is worth least. The pool asks a policy for ranks and evicts the lowest.

Facts every policy must respect, whatever its taste: attention beyond the last restorable state of its chain is dead
weight and goes first; a state whose attention is gone is dead; and the few states of a chain are worth as much as all
its attention, so they must not be singled out. The index keeps the first two (`PrefixIndex.is_dead`); the third holds
because a chain's states and attention are used, and therefore ranked, together.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

from dalsegno.kv.index import PrefixIndex

__all__ = ["EvictionPolicy", "LeastRecentlyUsed"]


class EvictionPolicy(Protocol):
    """Ranks published, unreferenced blocks; the lowest rank is evicted first. Called on the engine thread only.

    A rank may rise at any time. It falls only when the index reports a death.
    """

    def use(self, group: int, blocks: Sequence[int]) -> None:
        """Note that published blocks were used, given in rising order of worth."""
        ...

    def rank(self, group: int, block: int) -> int:
        """Return the worth of a published block."""
        ...

    def highest_rank(self, group: int, blocks: Iterable[int]) -> int:
        """Return the worth of the most valuable of `blocks`; at least one of them is published, others may not be."""
        ...


class LeastRecentlyUsed:
    """Rank by last use; dead blocks below all others, oldest first among themselves."""

    _DEAD = 1 << 62

    def __init__(self, index: PrefixIndex) -> None:
        """Rank the blocks of `index`."""
        self._index = index
        self._clock = 0
        self._last_use = [array("q", bytes(8 * count)) for count in index.num_blocks]

    def use(self, group: int, blocks: Sequence[int]) -> None:
        """Make `blocks` the most recently used, the last one most."""
        last_use = self._last_use[group]
        for clock, block in enumerate(blocks, self._clock + 1):
            last_use[block] = clock
        self._clock += len(blocks)

    def rank(self, group: int, block: int) -> int:
        """Return the time of last use, or a negative number for a dead block."""
        last_use = self._last_use[group][block]
        return last_use - self._DEAD if self._index.is_dead(group, block) else last_use

    def highest_rank(self, group: int, blocks: Iterable[int]) -> int:
        """Return the highest rank; only blocks that would raise it are asked whether they are dead."""
        last_use, highest = self._last_use[group], -self._DEAD
        for block in blocks:
            if last_use[block] > highest and self._index.is_published(group, block):
                highest = max(highest, self.rank(group, block))
        return highest
