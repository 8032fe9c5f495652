"""The self-check of the cache: every count recomputed from first principles."""

from collections import Counter
from typing import TYPE_CHECKING

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
    left = [dict(references) for references in manager.pool.references if references]
    assert not left, f"references left: {left}"
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
    counted = Counter(
        {(g, b): count for g, references in enumerate(manager.pool.references) for b, count in references.items()}
    )
    assert owed == counted, f"owed {dict(owed - counted)} and not counted, counted {dict(counted - owed)} and not owed"


def _verify_index(manager: "KVCacheManager") -> None:
    index = manager.index
    kinds = {group.kind: group.group_id for group in manager.layout.groups}
    attention, state = kinds.get(GroupKind.ATTENTION), kinds.get(GroupKind.STATE)
    vouched: list[dict[int, set[bytes]]] = [{} for _ in manager.layout.groups]
    for key, node in index.nodes.items():
        assert key == node.hash, "a node is filed under another hash"
        if node.parent is not None:
            assert node.parent.children.get(key) is node, "a node is unknown to its parent"
            assert node.boundary == node.parent.boundary + index.unit, "a boundary does not follow its parent's"
            assert node.children or any(node.blocks), "a node that holds nothing and leads nowhere was not pruned"
        for group, block in enumerate(node.blocks):
            if block:
                vouched[group].setdefault(block, set()).add(key)
        live = [c for c in node.children.values() if state is None or c.live_children or c.blocks[state]]
        if state is not None:
            assert node.live_children == len(live), f"{node.live_children} live children are counted, not {len(live)}"
        for spec in manager.layout.paged_groups:
            if node.blocks[spec.group_id] and (node.boundary - index.unit) % spec.block_size:
                assert node.parent is not None, "a root vouches for something"
                assert node.parent.blocks[spec.group_id], f"inside a block nobody vouches for {node.parent.boundary}"
        above = node.parent is None or node.parent.reachable
        has = node.parent is None or attention is None or node.blocks[attention] != NULL_BLOCK
        assert node.reachable == (above and has), f"node at {node.boundary} claims reachable={node.reachable}"
    for group in range(len(manager.layout.groups)):
        named = {b: {node.hash for node in index.vouched(group, b)} for b in index.published(group)}
        assert named == vouched[group], f"group {group}: blocks and nodes disagree"
        if state == group:
            assert all(len(hashes) == 1 for hashes in named.values()), "a state block vouches for two boundaries"


def _verify_slabs(manager: "KVCacheManager") -> None:
    pool = manager.pool
    reclaimable, opened = 0, [0] * len(manager.layout.groups)
    used: dict[int, set[int]] = {}
    for group in manager.layout.groups:
        g, k = group.group_id, group.blocks_per_slab
        blocks = set(pool.references[g]) | set(manager.index.published(g))
        assert all(block >= k for block in blocks), "the null slab is in use"
        for block in blocks:
            slab = block // k
            assert pool.bound[slab] == g, f"block {block} of group {g} lies in slab {slab} of group {pool.bound[slab]}"
            used.setdefault(slab, set()).add(block)
    for slab in range(1, pool.num_slabs):
        g = pool.bound[slab]
        assert (g >= 0) == (slab in used), f"slab {slab} is bound to {g} with blocks {used.get(slab)}"
        held = sum(block in pool.references[g] for block in used.get(slab, ()))
        if held:
            opened[g] += manager.layout.groups[g].blocks_per_slab - held
        else:
            reclaimable += 1
    assert reclaimable == pool.reclaimable, f"{pool.reclaimable} slabs are counted reclaimable, not {reclaimable}"
    assert opened == pool.open, f"open blocks are counted {pool.open}, not {opened}"
