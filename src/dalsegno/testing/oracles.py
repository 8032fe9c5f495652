"""Plainly right answers to what the core answers cleverly. Shares no code with it, and is as slow as it likes."""

import itertools
from collections.abc import Mapping, Sequence

from dalsegno.kv.index import PrefixIndex
from dalsegno.kv.manager import KVCacheManager
from dalsegno.prefix.resolve import Contains, LookupGroup
from dalsegno.testing.fake_worker import FakeWorker
from dalsegno.types import BlockHash, GroupKind

__all__ = [
    "audit_published",
    "boundary_by_definition",
    "boundary_in_index",
    "can_place",
    "can_restore",
    "vouched_hashes",
]


def can_restore(index: int, group: LookupGroup, boundary: int, contains: Contains) -> bool:
    """Whether a group restores `boundary`, by the definition of its kind and of its `prefix`."""
    if boundary == 0 or group.prefix == "none":
        return True
    size = group.block_size
    if group.prefix == "block" and boundary % size:
        return False
    if group.kind is GroupKind.STATE:
        return contains(index, 0, boundary)
    first_token = 0
    if group.kind is GroupKind.WINDOW:
        assert group.window is not None, "a window group has a window"
        first_token = max(0, boundary - group.window + 1)
    blocks = {token // size for token in range(first_token, boundary)}
    return all(contains(index, block, min(boundary, (block + 1) * size)) for block in blocks)


def boundary_by_definition(groups: Sequence[LookupGroup], unit: int, limit: int, contains: Contains) -> int:
    """The largest multiple of `unit` of at most `limit` that every group restores, found by counting down."""
    for boundary in range(limit, 0, -1):
        if boundary % unit == 0 and all(can_restore(i, g, boundary, contains) for i, g in enumerate(groups)):
            return boundary
    return 0


def can_place(needs: Sequence[int], blocks_per_slab: Sequence[int], slabs: Mapping[int, tuple[int, int]]) -> bool:
    """Whether `needs[g]` blocks per group can be placed, by trying every way to give slabs to groups.

    Args:
        needs: blocks per group.
        blocks_per_slab: per group.
        slabs: for every slab but the null slab (group that holds it, referenced blocks in it); (-1, 0) for one without
            a reference, which may be given to any group.
    """
    left = list(needs)
    for group, referenced in slabs.values():
        if referenced:
            left[group] -= blocks_per_slab[group] - referenced
    spare = sum(referenced == 0 for _, referenced in slabs.values())
    return any(
        all(blocks_per_slab[g] * given.count(g) >= left[g] for g in range(len(left)))
        for given in itertools.combinations_with_replacement(range(-1, len(left)), spare)
    )


def vouched_hashes(index: PrefixIndex, group: int) -> set[BlockHash]:
    """The hashes that some block of a group vouches for."""
    return {block_hash for block in index.published(group) for _, block_hash in index.vouched(group, block)}


def boundary_in_index(index: PrefixIndex, hashes: Sequence[BlockHash], limit: int) -> int:
    """The longest joint boundary that the published blocks allow, asked of every hash of the chain one by one."""
    vouched = [vouched_hashes(index, group) for group in range(len(index.groups))]
    known = len(hashes) * index.unit

    def contains(group: int, block_index: int, boundary: int) -> bool:
        if index.groups[group].is_state:
            return hashes[boundary // index.unit - 1] in vouched[group]
        end = min(known, (block_index + 1) * index.groups[group].block_size)
        ends = range(boundary, end + 1, index.unit)
        return any(hashes[e // index.unit - 1] in vouched[group] for e in ends)

    return boundary_by_definition(index.groups, index.unit, min(limit, known), contains)


def audit_published(manager: KVCacheManager, worker: FakeWorker, cells_of: Mapping[BlockHash, Sequence[int]]) -> None:
    """Check that every published block holds, for what it vouches for, what a cold run would have written.

    Args:
        manager: whose index is audited.
        worker: whose memory is read.
        cells_of: for every hash the cells of its whole prefix, from `extend_cells`.
    """
    for group in manager.layout.groups:
        for block in manager.index.published(group.group_id):
            for boundary, block_hash in manager.index.vouched(group.group_id, block):
                expected = cells_of[block_hash]
                start = len(expected) - 1 if group.is_state else (boundary - 1) // group.block_size * group.block_size
                found = worker.cells(group.group_id, block)[: boundary - start]
                where = f"block {block} of group {group.name} under boundary {boundary}"
                assert found == list(expected[start:]), f"{where} holds other bytes than a cold run wrote"
