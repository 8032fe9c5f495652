"""References that no request's table holds: hand-offs on their way, store jobs, loads.

They last as long as somebody outside takes, perhaps for ever, so what they hold is bounded: beside the slabs they keep
from being reclaimed, the largest request the engine admits must still find room.
"""

from collections import Counter
from collections.abc import Iterable

from dalsegno.kv.pool import SlabPool
from dalsegno.types import NULL_BLOCK

__all__ = ["BlockPins"]


class BlockPins:
    """Pins by (group, block), and the slabs they hold. Used on the engine thread only.

    Attributes:
        counts: pins of each (group, block); each is one reference in the pool.
        max_slabs: most slabs pins may hold for long, see `has_room`; None is no bound.
    """

    def __init__(self, pool: SlabPool) -> None:
        """Hold nothing yet."""
        self._pool = pool
        self._k = [group.blocks_per_slab for group in pool.layout.groups]
        self.counts: Counter[tuple[int, int]] = Counter()
        self.max_slabs: int | None = None
        self._slabs: Counter[int] = Counter()

    @property
    def num_slabs(self) -> int:
        """Slabs in which a pin is."""
        return len(self._slabs)

    def has_room(self, extra_slabs: int = 0) -> bool:
        """Whether the pins, with `extra_slabs` more, leave enough for the largest request."""
        return self.max_slabs is None or len(self._slabs) + extra_slabs <= self.max_slabs

    def pin(self, group: int, block: int) -> None:
        """Take a reference on a published or referenced block; the null block has none."""
        if block != NULL_BLOCK:
            self._pool.pin(group, block)
            self.adopt(group, block)

    def adopt(self, group: int, block: int) -> None:
        """Count a reference that the caller took on `block`, and passes on, as a pin."""
        key = group, block
        if key not in self.counts:
            self._slabs[block // self._k[group]] += 1
        self.counts[key] += 1

    def unpin(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Give pins back, one per (group, block)."""
        for key in blocks:
            group, block = key
            if block == NULL_BLOCK:
                continue
            assert self.counts[key] > 0, f"block {block} of group {group} has no pin"
            self.counts[key] -= 1
            if not self.counts[key]:
                del self.counts[key]
                slab = block // self._k[group]
                self._slabs[slab] -= 1
                if not self._slabs[slab]:
                    del self._slabs[slab]
            self._pool.unpin(group, block)
