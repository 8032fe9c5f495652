"""The pins of one child: a part of those the engine has given out."""

from collections import Counter
from collections.abc import Iterable

from dalsegno.kv.pins import BlockPins
from dalsegno.types import NULL_BLOCK

__all__ = ["ChildPins"]


class ChildPins(BlockPins):
    """Every pin is one of `shared`, and only who has taken a pin can give it back. The room is everybody's.

    Attributes:
        counts: the child's pins of each (group, block).
    """

    def __init__(self, shared: BlockPins) -> None:
        """Hold nothing yet."""
        self._shared = shared
        self.counts: Counter[tuple[int, int]] = Counter()

    @property
    def max_slabs(self) -> int | None:  # type: ignore[override]
        """See the base class."""
        return self._shared.max_slabs

    @property
    def num_slabs(self) -> int:
        """Slabs in which anybody's pin is."""
        return self._shared.num_slabs

    def has_room(self, extra_slabs: int = 0) -> bool:
        """See the base class."""
        return self._shared.has_room(extra_slabs)

    def pin(self, group: int, block: int) -> None:
        """See the base class."""
        if block != NULL_BLOCK:
            self._shared.pin(group, block)
            self.counts[group, block] += 1

    def adopt(self, group: int, block: int) -> None:
        """See the base class."""
        self._shared.adopt(group, block)
        self.counts[group, block] += 1

    def unpin(self, blocks: Iterable[tuple[int, int]]) -> None:
        """See the base class."""
        for key in blocks:
            group, block = key
            if block == NULL_BLOCK:
                continue
            assert self.counts[key] > 0, f"block {block} of group {group} has no pin of this connector"
            self.counts[key] -= 1
            if not self.counts[key]:
                del self.counts[key]
            self._shared.unpin([key])
