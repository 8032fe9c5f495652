"""The slab pool against a naive model: a dict of references and a set of cached blocks."""

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dalsegno.hashing.block_hash import root_hash
from dalsegno.kv.eviction import LeastRecentlyUsed
from dalsegno.kv.index import PrefixIndex
from dalsegno.kv.pool import SlabPool
from dalsegno.testing.builders import make_cut
from dalsegno.testing.oracles import can_place
from dalsegno.types import NULL_BLOCK, BlockHash

UNIT = 16

Block = tuple[int, int]


class PoolMachine(RuleBasedStateMachine):
    """Random references and publications over few slabs, so that every placement rule is met."""

    @initialize(
        kinds=st.sampled_from(["a", "s", "as", "aw", "aws"]),
        blocks_per_slab=st.lists(st.integers(1, 4), min_size=3, max_size=3),
        num_slabs=st.integers(2, 6),
        slab_reserve=st.none() | st.integers(0, 3),
    )
    def start(self, kinds: str, blocks_per_slab: list[int], num_slabs: int, slab_reserve: int | None) -> None:
        self.k = blocks_per_slab[: len(kinds)]
        layout = make_cut(kinds, self.k, num_slabs=num_slabs)
        self.index = PrefixIndex(layout, UNIT)
        self.pool = SlabPool(layout, self.index, LeastRecentlyUsed(self.index), slab_reserve)
        self.pool.on_fill = self.note_fill
        self.pool.on_evict = self.note_evicted
        self.references: dict[Block, int] = {}
        self.cached: set[Block] = set()
        self.filled: list[Block] = []
        self.evicted: list[Block] = []
        self.num_published = 0

    def note_fill(self, group: int, blocks: Sequence[int]) -> None:
        self.filled += [(group, block) for block in blocks]

    def note_evicted(self, group: int, block: int, hashes: Sequence[BlockHash]) -> None:
        self.evicted.append((group, block))

    def slabs(self) -> dict[int, tuple[int, int]]:
        """(group, referenced blocks) of every slab, from the model alone."""
        slabs = dict.fromkeys(range(1, self.pool.num_slabs), (-1, 0))
        for group, block in self.references:
            slab = block // self.k[group]
            owner, count = slabs[slab]
            assert owner in (-1, group), f"slab {slab} holds blocks of two groups"
            slabs[slab] = (group, count + 1)
        return slabs

    def some(self, blocks: Sequence[Block], draw: st.DataObject) -> Block:
        return draw.draw(st.sampled_from(sorted(blocks)))

    @rule(draw=st.data(), packs=st.booleans())
    def allocate(self, draw: st.DataObject, packs: bool) -> None:
        self.pool.packs = packs
        needs = draw.draw(st.lists(st.integers(0, 5), min_size=len(self.k), max_size=len(self.k)))
        near = []
        for group in range(len(self.k)):
            own = [block for g, block in self.references if g == group]
            near.append(draw.draw(st.sampled_from(sorted([NULL_BLOCK, *own]))))
        fits = can_place(needs, self.k, self.slabs())
        assert self.pool.fits(needs) == fits
        self.evicted.clear()
        self.filled.clear()
        taken = self.pool.allocate(needs, near)
        assert (taken is not None) == fits
        if taken is None:
            assert not self.evicted, "an allocation that failed evicted something"
            return
        assert [len(blocks) for blocks in taken] == needs
        blocks = [(group, block) for group, ids in enumerate(taken) for block in ids]
        assert len(set(blocks)) == len(blocks)
        assert not set(blocks) & set(self.references), "a block with a reference was handed out again"
        assert not set(self.evicted) & set(self.references), "a block with a reference was evicted"
        assert set(self.evicted) <= self.cached
        assert set(blocks) <= set(self.filled), "a block was handed out without being filled"
        self.cached -= set(self.evicted)
        self.references |= dict.fromkeys(blocks, 1)

    @precondition(lambda self: self.references or self.cached)
    @rule(draw=st.data())
    def pin(self, draw: st.DataObject) -> None:
        group, block = self.some([*self.references, *self.cached], draw)
        self.pool.pin(group, block)
        self.references[group, block] = self.references.get((group, block), 0) + 1

    @precondition(lambda self: self.references)
    @rule(draw=st.data(), used=st.booleans())
    def unpin(self, draw: st.DataObject, used: bool) -> None:
        group, block = self.some(list(self.references), draw)
        self.filled.clear()
        self.pool.unpin(group, block, used=used)
        self.references[group, block] -= 1
        if not self.references[group, block]:
            del self.references[group, block]
            assert ((group, block) in self.filled) == ((group, block) not in self.cached)

    @precondition(lambda self: set(self.references) - self.cached)
    @rule(draw=st.data())
    def publish(self, draw: st.DataObject) -> None:
        group, block = self.some(list(set(self.references) - self.cached), draw)
        self.num_published += 1
        root = root_hash(UNIT, str(self.num_published))
        assert self.index.publish(group, root, [BlockHash(root[::-1])], UNIT, block) == block
        self.cached.add((group, block))

    @precondition(lambda self: self.cached)
    @rule(draw=st.data())
    def unpublish(self, draw: st.DataObject) -> None:
        group, block = self.some(list(self.cached), draw)
        self.pool.unpublish(group, block)
        self.cached.remove((group, block))

    @rule(group=st.integers(0, 2))
    def the_null_block_has_no_references(self, group: int) -> None:
        group %= len(self.k)
        self.pool.pin(group, NULL_BLOCK)
        self.pool.unpin(group, NULL_BLOCK)
        assert self.pool.num_references(group, NULL_BLOCK) == 0

    @invariant()
    def references_are_those_of_the_model(self) -> None:
        found = {(g, b): count for g in range(len(self.k)) for b, count in self.pool.referenced(g).items()}
        assert found == self.references
        published = {(g, b) for g in range(len(self.k)) for b in self.index.published(g)}
        assert published == self.cached

    @invariant()
    def counters_are_those_of_the_model(self) -> None:
        slabs = self.slabs()
        opened = [0] * len(self.k)
        for group, count in slabs.values():
            if count:
                opened[group] += self.k[group] - count
        assert self.pool.open == opened
        assert self.pool.reclaimable == sum(count == 0 for _, count in slabs.values())
        assert self.pool.usage() == 1 - self.pool.reclaimable / len(slabs)
        in_use = {(block // self.k[group], group) for group, block in [*self.references, *self.cached]}
        assert {(slab, group) for slab, group in enumerate(self.pool.bound) if group >= 0} == in_use
        counts = self.pool.counts()
        assert counts["num_empty_slabs"] == len(slabs) - len(in_use)
        assert counts["num_reclaimable_slabs"] == self.pool.reclaimable


TestPoolMachine = PoolMachine.TestCase
