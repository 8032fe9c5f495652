"""The item of lowest rank among many, where ranks rise unnoticed and are asked again only when it matters."""

import heapq
from collections.abc import Callable

__all__ = ["RankQueue"]


class RankQueue:
    """Items by the rank noted last. An item that competes must be noted, and noted again when its rank falls."""

    def __init__(self) -> None:
        """Start empty."""
        self._ranks: dict[int, int] = {}
        # An entry counts only while it says what was noted last.
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        """Entries in memory, those that count no more included; bounded by the items."""
        return len(self._heap)

    def note(self, item: int, rank: int) -> None:
        """Let `item` compete with `rank`."""
        if self._ranks.get(item) == rank:
            return
        self._ranks[item] = rank
        heapq.heappush(self._heap, (rank, item))
        if len(self._heap) > 64 + 2 * len(self._ranks):
            self._heap = [(rank, item) for item, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def pop(self, rank_of: Callable[[int], int | None]) -> int | None:
        """Remove and return the item of lowest rank, or None when nothing competes.

        `rank_of(item)` is its rank now, at least the one noted last, or None for an item that is out of competition; it
        is forgotten until it is noted again.
        """
        while self._heap:
            rank, item = heapq.heappop(self._heap)
            if self._ranks.get(item) != rank:
                continue
            del self._ranks[item]
            current = rank_of(item)
            if current == rank:
                return item
            if current is not None:
                self.note(item, current)
        return None
