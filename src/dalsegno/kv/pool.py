"""Slabs and blocks: who holds what, what fits, where a block is placed, what is evicted.

A slab is bound to one group while any of its blocks is referenced or cached. It is *held* while one of them has a
reference, else *reclaimable*. A block is *open* when it has no reference and its slab is held. These invariants make
the fits test exact, before anything is evicted:

    open[g]     = unreferenced blocks (free or cached) of held slabs bound to g
    reclaimable = slabs without a reference, the null slab excluded
    needs fit  <=>  sum over g of ceil(max(0, need[g] - open[g]) / k[g]) <= reclaimable
"""

import heapq
from collections.abc import Callable, Mapping, Sequence

from dalsegno.kv.eviction import EvictionPolicy
from dalsegno.kv.index import Node, PrefixIndex
from dalsegno.kv.layout import MemoryLayout
from dalsegno.types import NULL_BLOCK

__all__ = ["SlabPool"]

_UNBOUND = -1


class SlabPool:
    """All blocks of the device. Owns references and slab bindings; knows nothing of requests.

    Used on the engine thread only. `on_fill(group, blocks)`, if set, is called for blocks that hold nothing worth
    keeping: when they are handed out and when they become free. While `packs` is set, no slab is taken that open blocks
    could spare.
    """

    def __init__(
        self, layout: MemoryLayout, index: PrefixIndex, policy: EvictionPolicy, slab_reserve: int | None = None
    ) -> None:
        """Start with every slab but the null slab empty.

        Args:
            layout: groups and slabs.
            index: told when a cached block is evicted.
            policy: ranks cached blocks.
            slab_reserve: below this many spare slabs, requests share slabs instead of taking their own.
        """
        self.layout = layout
        self.num_slabs = layout.num_slabs
        self._index = index
        self._policy = policy
        self._k = [group.blocks_per_slab for group in layout.groups]
        self._serve_order = sorted(range(len(self._k)), key=self._k.__getitem__)
        self.slab_reserve = min(8, layout.num_slabs // 8) if slab_reserve is None else slab_reserve
        self.references: list[dict[int, int]] = [{} for _ in self._k]
        self.open = [0] * len(self._k)
        self.reclaimable = layout.num_slabs - 1
        self.packs = False
        self.num_evicted = 0
        self.bound = [_UNBOUND] * layout.num_slabs
        self._held = [0] * layout.num_slabs
        self._free: list[list[int]] = [[] for _ in range(layout.num_slabs)]
        self._empty = list(range(layout.num_slabs - 1, 0, -1))
        self._held_with_free: list[dict[int, None]] = [{} for _ in self._k]
        # Heaps are lazy: an entry counts only if it still says the truth when it is popped.
        self._slab_heap: list[tuple[int, int]] = []
        self._stale_slabs: set[int] = set()
        self._block_heap: list[list[tuple[int, int]]] = [[] for _ in self._k]
        self.on_fill: Callable[[int, Sequence[int]], None] | None = None
        self.on_evict: Callable[[int, int, Sequence[Node]], None] | None = None
        index.on_rank_change = self._rank_changed

    def pin(self, group: int, block: int) -> None:
        """Take one reference on a published or referenced block; the null block has none."""
        if block == NULL_BLOCK:
            return
        references = self.references[group]
        count = references.get(block, 0)
        references[block] = count + 1
        if count == 0:
            self._hold(group, block)

    def unpin(self, group: int, block: int, *, used: bool = True) -> None:
        """Drop one reference; the last one leaves the block cached if it is published, else free.

        `used` False takes a pin back as if it had never been: the block's last use stays what it was.
        """
        if block == NULL_BLOCK:
            return
        references = self.references[group]
        count = references[block]
        if count > 1:
            references[block] = count - 1
            return
        del references[block]
        cached = self._index.is_published(group, block)
        if cached and used:
            self._policy.use(group, block)
        self._release(group, block, cached)

    def num_references(self, group: int, block: int) -> int:
        """References on a block."""
        return self.references[group].get(block, 0)

    def unpublish(self, group: int, block: int) -> None:
        """Take a block's hashes back; without a reference it becomes free."""
        self._index.unpublish(group, block)
        if block not in self.references[group]:
            self._free_block(group, block)

    def slabs_needed(self, needs: Sequence[int]) -> int:
        """Reclaimable slabs that `needs[g]` blocks per group take beyond the open ones."""
        return sum(
            -(-(need - free) // k) for need, free, k in zip(needs, self.open, self._k, strict=True) if need > free
        )

    def fits(self, needs: Sequence[int]) -> bool:
        """Whether `needs[g]` blocks per group can be had, evicting whatever has no reference."""
        return self.slabs_needed(needs) <= self.reclaimable

    def allocate(self, needs: Sequence[int], near: Sequence[int]) -> list[list[int]] | None:
        """Hand out `needs[g]` blocks per group, each with one reference, or None (nothing changed).

        Args:
            needs: blocks per group.
            near: per group a block of the same request, whose slab is filled first; the null block for none.
        """
        if not self.fits(needs):
            return None
        left = list(needs)
        taken: list[list[int]] = [[] for _ in needs]
        for group in self._serve_order:
            slab = near[group] // self._k[group]
            while left[group]:
                block = self._place(group, slab, left)
                left[group] -= 1
                slab = block // self._k[group]
                taken[group].append(block)
            if taken[group] and self.on_fill is not None:
                self.on_fill(group, taken[group])
        return taken

    def _place(self, group: int, slab: int, left: Sequence[int]) -> int:
        """Take one block: the request's slab, then a slab of its own, then open blocks, then whatever is left."""
        if slab and self.bound[slab] == group and self._held[slab] and self._free[slab]:
            return self._take(group, self._free[slab][-1])
        spare = self.reclaimable - self.slabs_needed(left)
        if self.packs or spare <= self.slab_reserve:
            block = self._open_block(group)
            if block is not None:
                return self._take(group, block)
        slab = self._empty.pop() if self._empty else self._reclaim()
        self._bind(slab, group)
        return self._take(group, self._free[slab][-1])

    def _open_block(self, group: int) -> int | None:
        """An unreferenced block of a held slab: a free one, else the cached one that is worth least, evicted."""
        if self.open[group] == 0:
            return None
        if self._held_with_free[group]:
            return self._free[next(iter(self._held_with_free[group]))][-1]
        heap = self._block_heap[group]
        while heap:
            rank, block = heapq.heappop(heap)
            if (
                block not in self.references[group]
                and self._held[block // self._k[group]]
                and self._index.is_published(group, block)
                and self._policy.rank(group, block) == rank
            ):
                self._evict(group, block)
                return block
        raise AssertionError(f"group {group} counts {self.open[group]} open blocks, none was found")

    def _reclaim(self) -> int:
        """Evict everything from the reclaimable slab whose most valuable block is worth least."""
        for slab in self._stale_slabs:
            if self._is_reclaimable(slab):
                heapq.heappush(self._slab_heap, (self._slab_rank(slab), slab))
        self._stale_slabs.clear()
        while self._slab_heap:
            rank, slab = heapq.heappop(self._slab_heap)
            if self._is_reclaimable(slab) and self._slab_rank(slab) == rank:
                group = self.bound[slab]
                for block in self._blocks(slab):
                    if self._index.is_published(group, block):
                        self._evict(group, block)
                assert self.bound[slab] == _UNBOUND, f"slab {slab} is reclaimed but still bound"
                return self._empty.pop()
        raise AssertionError(f"{self.reclaimable} slabs are counted reclaimable, none was found")

    def _blocks(self, slab: int) -> range:
        k = self._k[self.bound[slab]]
        return range(slab * k, (slab + 1) * k)

    def _is_reclaimable(self, slab: int) -> bool:
        return self.bound[slab] != _UNBOUND and self._held[slab] == 0

    def _slab_rank(self, slab: int) -> int:
        group = self.bound[slab]
        return max(self._policy.rank(group, b) for b in self._blocks(slab) if self._index.is_published(group, b))

    def _bind(self, slab: int, group: int) -> None:
        self.bound[slab] = group
        self._free[slab] = list(reversed(self._blocks(slab)))

    def _take(self, group: int, block: int) -> int:
        """Reference a free block for the first time."""
        slab = block // self._k[group]
        free = self._free[slab]
        if free[-1] == block:
            free.pop()
        else:
            free.remove(block)
        self.references[group][block] = 1
        self._hold(group, block)
        if not free:
            self._held_with_free[group].pop(slab, None)
        return block

    def _hold(self, group: int, block: int) -> None:
        """A block's references went from 0 to 1."""
        slab = block // self._k[group]
        self._held[slab] += 1
        if self._held[slab] > 1:
            self.open[group] -= 1
            return
        self.reclaimable -= 1
        self.open[group] += self._k[group] - 1
        if self._free[slab]:
            self._held_with_free[group][slab] = None
        if self._k[group] > 1:
            for other in self._blocks(slab):
                if other not in self.references[group] and self._index.is_published(group, other):
                    self._offer(group, other)

    def _release(self, group: int, block: int, cached: bool) -> None:
        """A block's references went from 1 to 0."""
        slab = block // self._k[group]
        self._held[slab] -= 1
        if self._held[slab]:
            self.open[group] += 1
        else:
            self.reclaimable += 1
            self.open[group] -= self._k[group] - 1
            self._held_with_free[group].pop(slab, None)
            self._stale_slabs.add(slab)
        if cached:
            self._rank_changed(group, block)
        else:
            self._free_block(group, block)

    def _free_block(self, group: int, block: int) -> None:
        """A block has neither reference nor hash: back to its slab, and the slab back if it was the last."""
        if self.on_fill is not None:
            self.on_fill(group, [block])
        slab = block // self._k[group]
        free = self._free[slab]
        free.append(block)
        if len(free) == self._k[group]:
            assert self._held[slab] == 0, f"slab {slab} is all free but held"
            self.bound[slab] = _UNBOUND
            free.clear()
            self._empty.append(slab)
        elif self._held[slab]:
            self._held_with_free[group][slab] = None
        else:
            self._stale_slabs.add(slab)

    def _evict(self, group: int, block: int) -> None:
        self.num_evicted += 1
        nodes = self._index.unpublish(group, block)
        if self.on_evict is not None:
            self.on_evict(group, block, nodes)
        self._free_block(group, block)

    def _rank_changed(self, group: int, block: int) -> None:
        """Note the new rank of a cached block where it competes: singly in a held slab, else with its slab."""
        if block in self.references[group] or not self._index.is_published(group, block):
            return
        slab = block // self._k[group]
        if self._held[slab]:
            self._offer(group, block)
        else:
            self._stale_slabs.add(slab)

    def _offer(self, group: int, block: int) -> None:
        heap = self._block_heap[group]
        heapq.heappush(heap, (self._policy.rank(group, block), block))
        if len(heap) > 64 + 4 * len(self.references[group]) + 4 * self.num_slabs * self._k[group]:
            self._block_heap[group] = [
                (self._policy.rank(group, b), b)
                for b in {b for _, b in heap}
                if b not in self.references[group] and self._index.is_published(group, b)
            ]
            heapq.heapify(self._block_heap[group])

    def usage(self) -> float:
        """Share of slabs that hold a referenced block, in [0, 1]."""
        return 1.0 - self.reclaimable / max(1, self.num_slabs - 1)

    def counts(self) -> Mapping[str, int]:
        """Slabs by what they are, for start-up messages and statistics."""
        return {
            "num_slabs": self.num_slabs - 1,
            "num_reclaimable_slabs": self.reclaimable,
            "num_empty_slabs": len(self._empty),
        }
