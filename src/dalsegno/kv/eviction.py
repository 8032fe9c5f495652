"""Which cached block is worth least. The pool asks a policy for ranks and evicts the lowest.

Facts every policy must respect, whatever its taste: attention beyond the last restorable state of its chain is dead
weight and goes first; a state whose attention is gone is dead; and the few states of a chain are worth as much as all
its attention, so they must not be singled out. The index keeps the first two (`PrefixIndex.is_dead`); the third holds
because a chain's states and attention are used, and therefore ranked, together.
"""

from typing import Protocol

from dalsegno.kv.index import PrefixIndex

__all__ = ["EvictionPolicy", "LeastRecentlyUsed"]


class EvictionPolicy(Protocol):
    """Ranks published, unreferenced blocks; the lowest rank is evicted first. Called on the engine thread only."""

    def use(self, group: int, block: int) -> None:
        """Note that `block` was used; called in rising order of worth where several are used at once."""
        ...

    def rank(self, group: int, block: int) -> int:
        """Return the worth of a published block; changes only by `use` and when the index reports a rank change."""
        ...


class LeastRecentlyUsed:
    """Rank by last use; dead blocks below all others, oldest first among themselves."""

    _DEAD = 1 << 62

    def __init__(self, index: PrefixIndex) -> None:
        """Rank the blocks of `index`."""
        self._index = index
        self._clock = 0
        self._last_use: list[dict[int, int]] = [{} for _ in index.groups]

    def use(self, group: int, block: int) -> None:
        """Make `block` the most recently used."""
        self._clock += 1
        self._last_use[group][block] = self._clock

    def rank(self, group: int, block: int) -> int:
        """Return the time of last use, or a negative number for a dead block."""
        last_use = self._last_use[group].get(block, 0)
        return last_use - self._DEAD if self._index.is_dead(group, block) else last_use
