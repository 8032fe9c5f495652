"""The self-check of the cache: every count recomputed from first principles."""

from collections import Counter
from typing import TYPE_CHECKING

from dalsegno.kv.runs import Run
from dalsegno.types import NULL_BLOCK, GroupKind

if TYPE_CHECKING:
    from dalsegno.kv.manager import KVCacheManager

__all__ = ["census", "verify_manager"]


def verify_manager(manager: "KVCacheManager") -> None:
    """Check references, index, slabs and counters against each other; AssertionError names the first difference."""
    _verify_references(manager)
    _verify_index(manager)
    _verify_slabs(manager)


def census(manager: "KVCacheManager") -> None:
    """Check that an idle manager holds nothing: no request entry, no reference, every slab reclaimable."""
    verify_manager(manager)
    assert not manager.requests, f"request entries left: {sorted(manager.requests)}"
    assert not manager.copies_in_flight, f"copies left in flight: {manager.copies_in_flight}"
    left = [manager.pool.referenced(group) for group in range(len(manager.layout.groups))]
    assert not any(left), f"references left: {left}"
    reclaimable, slabs = manager.pool.reclaimable, manager.pool.num_slabs
    assert reclaimable == slabs - 1, f"{reclaimable} of {slabs - 1} slabs are reclaimable when idle"


def _verify_references(manager: "KVCacheManager") -> None:
    """Every reference has an owner: a table, a state slot, a copy in flight, a pin."""
    owed: Counter[tuple[int, int]] = Counter(manager.pins.counts)
    for _, copy in manager.copies_in_flight:
        owed[copy.group_id, copy.source] += 1
    for blocks in manager.requests.values():
        for group_id, table in enumerate(blocks.tables):
            owed.update((group_id, block) for block in table if block != NULL_BLOCK)
        owed.update((copy.group_id, copy.source) for copy in blocks.copies)
        if blocks.state is not None:
            assert manager.state is not None, "state blocks without a state group"
            owed.update((manager.state.group_id, block) for block in blocks.state.held())
    groups = range(len(manager.layout.groups))
    counted = Counter({(g, b): count for g in groups for b, count in manager.pool.referenced(g).items()})
    assert owed == counted, f"owed {dict(owed - counted)} and not counted, counted {dict(counted - owed)} and not owed"


def _verify_index(manager: "KVCacheManager") -> None:
    index = manager.index
    num_units = 0
    for block_hash, run in index.tree.ends.items():
        assert run.hash_at(run.end) == block_hash, "a run is filed under another hash"
        num_units += run.size
        _verify_run(manager, run)
    assert num_units == index.num_units, f"{index.num_units} units are counted, not {num_units}"
    for spec in manager.layout.groups:
        group = spec.group_id
        vouched: dict[int, set[int]] = {}
        for run in index.tree:
            for offset, block in enumerate(run.blocks[group]):
                if block:
                    vouched.setdefault(block, set()).add(run.start + offset + 1)
            if spec.is_state and run.state:
                assert run.state not in vouched, "a state block vouches for two boundaries"
                vouched[run.state] = {run.end}
        named = {b: {p // index.unit for p, _ in index.vouched(group, b)} for b in index.published(group)}
        assert named == vouched, f"group {group}: blocks and runs disagree"


def _verify_run(manager: "KVCacheManager", run: Run) -> None:
    """Check a run against its neighbours: links, states below, attention without a hole, order inside blocks."""
    groups = {group.kind: group.group_id for group in manager.layout.groups}
    attention = groups.get(GroupKind.ATTENTION)
    assert all(child.parent is run and child.first == first for first, child in run.children.items()), "a child is lost"
    live = sum(child.has_state for child in run.children.values())
    assert run.live_children == live, f"{run.live_children} live children are counted, not {live}"
    if run.parent is None:
        assert run.size == 0, "a root holds units"
        assert run.children, "a root leads nowhere"
        return
    assert run.size > 0, "a run without units was not pruned"
    assert run.parent.children.get(run.hash_at(run.start + 1)) is run, "a run is unknown to its parent"
    assert run.start == run.parent.end, "a run does not follow its parent"
    paged = [(spec.block_size // manager.unit, run.blocks[spec.group_id]) for spec in manager.layout.paged_groups]
    assert run.children or run.state or any(column[-1] for _, column in paged), "a unit that leads nowhere is left"
    before = [spec.group_id for spec in manager.layout.paged_groups]
    for group, (size, column) in zip(before, paged, strict=True):
        assert len(column) == run.size, "a run has another number of units and of blocks"
        last = run.parent.blocks[group][-1] if run.parent.size else NULL_BLOCK
        for depth, block in enumerate(column, run.start):
            assert not block or depth % size == 0 or last, f"inside a block nobody vouches for unit {depth}"
            last = block
    if attention is not None:
        column = run.blocks[attention]
        above = run.parent.reach == run.parent.size
        reach = next((i for i, block in enumerate(column) if not block), run.size) if above else 0
        assert run.reach == reach, f"attention is said to reach {run.reach} units, not {reach}"


def _verify_slabs(manager: "KVCacheManager") -> None:
    pool = manager.pool
    reclaimable, opened = 0, [0] * len(manager.layout.groups)
    used: dict[int, set[int]] = {}
    for group in manager.layout.groups:
        g, k = group.group_id, group.blocks_per_slab
        blocks = {*pool.referenced(g), *manager.index.published(g)}
        assert all(block >= k for block in blocks), "the null slab is in use"
        for block in blocks:
            slab = block // k
            assert pool.bound[slab] == g, f"block {block} of group {g} lies in slab {slab} of group {pool.bound[slab]}"
            used.setdefault(slab, set()).add(block)
    for slab in range(1, pool.num_slabs):
        g = pool.bound[slab]
        assert (g >= 0) == (slab in used), f"slab {slab} is bound to {g} with blocks {used.get(slab)}"
        held = sum(pool.references[g][block] > 0 for block in used.get(slab, ()))
        if held:
            opened[g] += manager.layout.groups[g].blocks_per_slab - held
        else:
            reclaimable += 1
    assert reclaimable == pool.reclaimable, f"{pool.reclaimable} slabs are counted reclaimable, not {reclaimable}"
    assert opened == pool.open, f"open blocks are counted {pool.open}, not {opened}"
