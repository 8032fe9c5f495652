"""Slabs and blocks: who holds what, what fits, where a block is placed, what is evicted.

A slab is bound to one group while any of its blocks is referenced or cached. It is *held* while one of them has a
reference, else *reclaimable*. A block is *open* when it has no reference and its slab is held. These invariants make
the fits test exact, before anything is evicted:

    open[g]     = unreferenced blocks (free or cached) of held slabs bound to g
    reclaimable = slabs without a reference, the null slab excluded
    needs fit  <=>  sum over g of ceil(max(0, need[g] - open[g]) / k[g]) <= reclaimable
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from dalsegno.kv.eviction import EvictionPolicy
from dalsegno.kv.index import PrefixIndex
from dalsegno.kv.layout import MemoryLayout
from dalsegno.kv.rank_queue import RankQueue
from dalsegno.types import BlockHash

__all__ = ["SlabPool"]

_UNBOUND = -1


class SlabPool:
    """All blocks of the device. Owns references and slab bindings; knows nothing of requests.

    Used on the engine thread only. `on_fill(group, blocks)`, if set, is called for blocks that hold nothing worth
    keeping: when they are handed out and when they become free. `on_evict(group, block, hashes)`, if set, is told of
    every eviction and what nobody vouches for since. While `packs` is set, no slab is taken that open blocks could
    spare.

    Attributes:
        references: per group, the number of references on each block.
        bound: the group each slab is bound to.
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
        self.references = [array("i", bytes(4 * k * layout.num_slabs)) for k in self._k]
        self.open = [0] * len(self._k)
        self.reclaimable = layout.num_slabs - 1
        self.packs = False
        self.num_evicted = 0
        self.bound = [_UNBOUND] * layout.num_slabs
        self._held = [0] * layout.num_slabs
        self._free: list[list[int]] = [[] for _ in range(layout.num_slabs)]
        self._empty = list(range(layout.num_slabs - 1, 0, -1))
        self._held_with_free: list[dict[int, None]] = [{} for _ in self._k]
        # Slabs and single blocks that compete for staying, and those whose rank must be noted before one is evicted.
        self._slab_queue = RankQueue()
        self._block_queues = [RankQueue() for _ in self._k]
        self._stale_slabs: set[int] = set()
        self._stale_blocks: list[set[int]] = [set() for _ in self._k]
        self.on_fill: Callable[[int, Sequence[int]], None] | None = None
        self.on_evict: Callable[[int, int, Sequence[BlockHash]], None] | None = None
        index.on_death = self._note_deaths

    def pin(self, group: int, block: int) -> None:
        """Take one reference on a published or referenced block; the null block has none."""
        self.pin_all(group, (block,))

    def pin_all(self, group: int, blocks: Iterable[int]) -> None:
        """Take one reference on each of `blocks`, as `pin`."""
        references = self.references[group]
        fresh = []
        for block in blocks:
            if block:
                if not references[block]:
                    fresh.append(block)
                references[block] += 1
        for slab, count in self._by_slab(group, fresh).items():
            self._hold(group, slab, count)

    def unpin(self, group: int, block: int, *, used: bool = True) -> None:
        """Drop one reference; the last one leaves the block cached if it is published, else free.

        `used` False takes a pin back as if it had never been: the block's last use stays what it was.
        """
        self.unpin_all(group, (block,), used=used)

    def unpin_all(self, group: int, blocks: Iterable[int], *, used: bool = True) -> None:
        """Drop one reference of each of `blocks`, as `unpin`; later ones count as used more recently."""
        references = self.references[group]
        dropped = []
        for block in blocks:
            if block:
                count = references[block] - 1
                assert count >= 0, f"block {block} of group {group} has no reference"
                references[block] = count
                if not count:
                    dropped.append(block)
        if not dropped:
            return
        cached = self._index.select_published(group, dropped)
        if used:
            self._policy.use(group, cached)
        shared = False
        for slab, count in self._by_slab(group, dropped).items():
            self._release(group, slab, count)
            shared = shared or self._held[slab] > 0
        if shared:
            self._note_deaths(group, cached)
        if len(cached) < len(dropped):
            self._free_blocks(group, [block for block in dropped if not self._index.is_published(group, block)])

    def num_references(self, group: int, block: int) -> int:
        """References on a block."""
        return self.references[group][block]

    def referenced(self, group: int) -> dict[int, int]:
        """References of all blocks of a group that have one."""
        return {block: count for block, count in enumerate(self.references[group]) if count}

    def unpublish(self, group: int, block: int) -> None:
        """Take a block's hashes back; without a reference it becomes free."""
        self._index.unpublish(group, block)
        if not self.references[group][block]:
            self._free_blocks(group, [block])

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
            if left[group]:
                taken[group] = self._place(group, near[group] // self._k[group], left)
                if self.on_fill is not None:
                    self.on_fill(group, taken[group])
        return taken

    def _place(self, group: int, slab: int, left: list[int]) -> list[int]:
        """Take `left[group]` blocks: the request's slab, slabs of its own, open blocks, then whatever is left.

        Modifies `left`, what is to be placed in all groups.
        """
        blocks: list[int] = []
        if slab and self.bound[slab] == group and self._held[slab]:
            blocks += self._take(group, slab, left[group])
            left[group] -= len(blocks)
        while left[group]:
            if self.packs or self.reclaimable - self.slabs_needed(left) <= self.slab_reserve:
                slab = self._open_slab(group) if self.open[group] else self._new_slab(group)
                taken = self._take(group, slab, left[group])
            else:
                # Open blocks could not spare these, so as many slabs as before stay beside all that is to be placed.
                whole = max(0, left[group] - self.open[group]) // self._k[group]
                taken = self._take_whole(group, whole) or self._take(group, self._new_slab(group), left[group])
            blocks += taken
            left[group] -= len(taken)
        return blocks

    def _take(self, group: int, slab: int, count: int) -> list[int]:
        """Reference up to `count` free blocks of a slab, those freed last first."""
        free, references = self._free[slab], self.references[group]
        blocks = free[: -count - 1 : -1]
        if blocks:
            del free[-len(blocks) :]
            for block in blocks:
                references[block] = 1
            self._hold(group, slab, len(blocks))
        return blocks

    def _take_whole(self, group: int, count: int) -> list[int]:
        """Reference all blocks of up to `count` empty slabs."""
        count = min(count, len(self._empty))
        if not count:
            return []
        references, k = self.references[group], self._k[group]
        slabs = self._empty[: -count - 1 : -1]
        del self._empty[-count:]
        for slab in slabs:
            self.bound[slab] = group
            self._held[slab] = k
        self.reclaimable -= count
        blocks = [block for slab in slabs for block in range(slab * k, slab * k + k)]
        for block in blocks:
            references[block] = 1
        return blocks

    def _open_slab(self, group: int) -> int:
        """A held slab with a free block; if there is none, the cached open block that is worth least is evicted."""
        if self._held_with_free[group]:
            return next(iter(self._held_with_free[group]))
        self._note_ranks()

        def rank_of(block: int) -> int | None:
            is_open = not self.references[group][block] and self._held[block // self._k[group]]
            return self._policy.rank(group, block) if is_open and self._index.is_published(group, block) else None

        block = self._block_queues[group].pop(rank_of)
        assert block is not None, f"group {group} counts {self.open[group]} open blocks, none was found"
        self._evict(group, block)
        return block // self._k[group]

    def _new_slab(self, group: int) -> int:
        """Bind an empty slab; if there is none, the slab whose most valuable block is worth least is emptied."""
        if not self._empty:
            self._note_ranks()
            slab = self._slab_queue.pop(lambda slab: self._slab_rank(slab) if self._is_reclaimable(slab) else None)
            assert slab is not None, f"{self.reclaimable} slabs are counted reclaimable, none was found"
            for block in self._index.select_published(self.bound[slab], self._blocks(slab)):
                self._evict(self.bound[slab], block)
            assert self.bound[slab] == _UNBOUND, f"slab {slab} is reclaimed but still bound"
        slab = self._empty.pop()
        self.bound[slab] = group
        self._free[slab] = list(reversed(self._blocks(slab)))
        return slab

    def _blocks(self, slab: int) -> range:
        k = self._k[self.bound[slab]]
        return range(slab * k, (slab + 1) * k)

    def _by_slab(self, group: int, blocks: Sequence[int]) -> Mapping[int, int]:
        """How many of `blocks` lie in each slab."""
        k = self._k[group]
        return Counter([block // k for block in blocks])

    def _is_reclaimable(self, slab: int) -> bool:
        return self.bound[slab] != _UNBOUND and self._held[slab] == 0

    def _slab_rank(self, slab: int) -> int:
        return self._policy.highest_rank(self.bound[slab], self._blocks(slab))

    def _hold(self, group: int, slab: int, count: int) -> None:
        """References of `count` blocks of a slab went from 0 to 1."""
        if self._held[slab]:
            self.open[group] -= count
        else:
            self.reclaimable -= 1
            self.open[group] += self._k[group] - count
            # What is cached in it competes block by block from now on.
            self._stale_slabs.add(slab)
        self._held[slab] += count
        if self._free[slab]:
            self._held_with_free[group][slab] = None
        else:
            self._held_with_free[group].pop(slab, None)

    def _release(self, group: int, slab: int, count: int) -> None:
        """References of `count` blocks of a slab went from 1 to 0."""
        self._held[slab] -= count
        if self._held[slab]:
            self.open[group] += count
        else:
            self.reclaimable += 1
            self.open[group] -= self._k[group] - count
            self._held_with_free[group].pop(slab, None)
            self._stale_slabs.add(slab)

    def _free_blocks(self, group: int, blocks: Sequence[int]) -> None:
        """Blocks have neither reference nor hash: back to their slabs, and the slabs back if they were the last."""
        if self.on_fill is not None:
            self.on_fill(group, blocks)
        k = self._k[group]
        for block in blocks:
            slab = block // k
            free = self._free[slab]
            free.append(block)
            if len(free) == k:
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
        hashes = self._index.unpublish(group, block)
        if self.on_evict is not None:
            self.on_evict(group, block, hashes)
        self._free_blocks(group, [block])

    def _note_deaths(self, group: int, blocks: Iterable[int]) -> None:
        """Ranks of cached blocks may have fallen: each competes singly in a held slab, else with its slab."""
        references, held, k = self.references[group], self._held, self._k[group]
        for block in blocks:
            if not held[block // k]:
                self._stale_slabs.add(block // k)
            elif not references[block]:
                self._stale_blocks[group].add(block)

    def _note_ranks(self) -> None:
        """Let everything compete whose rank may have fallen, or that competes anew, since the last time."""
        for slab in self._stale_slabs:
            group = self.bound[slab]
            if self._is_reclaimable(slab):
                self._slab_queue.note(slab, self._slab_rank(slab))
            elif group != _UNBOUND:
                self._stale_blocks[group].update(self._blocks(slab))
        self._stale_slabs.clear()
        for group, stale in enumerate(self._stale_blocks):
            for block in self._index.select_published(group, stale):
                if not self.references[group][block] and self._held[block // self._k[group]]:
                    self._block_queues[group].note(block, self._policy.rank(group, block))
            stale.clear()

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
