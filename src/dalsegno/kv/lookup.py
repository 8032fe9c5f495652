"""Finding a hit in the device pool, and saying why it is not longer."""

from collections import OrderedDict
from collections.abc import Sequence

from dalsegno.hit_report import HitReport, LostReason, lost_tokens
from dalsegno.kv.index import Node, PrefixIndex
from dalsegno.kv.layout import GroupSpec
from dalsegno.kv.tables import ComputedBlocks
from dalsegno.prefix.resolve import resolve, window_first_block
from dalsegno.types import NULL_BLOCK, BlockHash

__all__ = ["EvictedRing", "explain_hit", "find_hit", "junction_of"]


class EvictedRing:
    """The hashes evicted last, by group: what makes "evicted" a different answer from "never seen"."""

    def __init__(self, capacity: int = 65_536) -> None:
        """Remember up to `capacity` hashes."""
        self._capacity = capacity
        self._hashes: OrderedDict[tuple[int, BlockHash], None] = OrderedDict()

    def add(self, group: int, nodes: Sequence[Node]) -> None:
        """Note that `group` no longer vouches for `nodes`."""
        for node in nodes:
            self._hashes[group, node.hash] = None
            self._hashes.move_to_end((group, node.hash))
        while len(self._hashes) > self._capacity:
            self._hashes.popitem(last=False)

    def __contains__(self, key: tuple[int, BlockHash]) -> bool:
        """Whether (group, hash) was evicted and not forgotten since."""
        return key in self._hashes

    def clear(self) -> None:
        """Forget everything."""
        self._hashes.clear()


def find_hit(index: PrefixIndex, root: BlockHash, hashes: Sequence[BlockHash], limit: int) -> ComputedBlocks:
    """The longest joint boundary of a chain in the index, at most `limit`, with the blocks that restore it."""
    unit = index.unit

    def contains(group: int, block_index: int, boundary: int) -> bool:
        return index.find(group, hashes[boundary // unit - 1]) != NULL_BLOCK

    limit = min(limit, len(hashes) * unit)
    resolution = resolve(index.groups, unit, limit, contains, index.attention_reach(hashes, limit))
    boundary = resolution.boundary
    tables: list[tuple[int, ...]] = []
    state_block = NULL_BLOCK
    for group in index.groups:
        if group.is_state:
            state_block = index.find(group.group_id, hashes[boundary // unit - 1]) if boundary else NULL_BLOCK
        tables.append(() if group.is_state or not boundary else _table(index, group, hashes, boundary))
    return ComputedBlocks(boundary, tuple(tables), state_block, root, hashes, resolution.by_group)


def _table(index: PrefixIndex, group: GroupSpec, hashes: Sequence[BlockHash], boundary: int) -> tuple[int, ...]:
    """The blocks of a paged group that restore `boundary`, with null blocks where it needs none."""
    size = group.block_size
    full = boundary // size
    if group.prefix == "none":
        return (NULL_BLOCK,) * full
    first = 0 if group.window is None else window_first_block(boundary, group.window, size)
    units = size // index.unit
    ends = list(hashes[(first + 1) * units - 1 : full * units : units])
    if boundary % size:
        ends.append(hashes[boundary // index.unit - 1])
    return (*(NULL_BLOCK,) * first, *index.blocks_at(group.group_id, ends))


def junction_of(computed: ComputedBlocks, index: PrefixIndex) -> int | None:
    """The boundary up to which attention matched beyond any kept state: somebody shares the prefix up to there."""
    shared = [
        computed.boundary_by_group[group.name]
        for group in index.groups
        if not group.is_state and group.prefix != "none"
    ]
    has_state = any(group.is_state for group in index.groups)
    return shared[0] if has_state and shared and shared[0] > computed.boundary else None


def explain_hit(index: PrefixIndex, evicted: EvictedRing, computed: ComputedBlocks, num_tokens: int) -> HitReport:
    """Report a hit of a prompt of `num_tokens` tokens: where it ends, and what became of every token after it."""
    unit = index.unit
    hashes, boundary = computed.hashes, computed.boundary
    others = [computed.boundary_by_group[g.name] for g in index.groups if g.prefix != "none" and not g.is_state]
    covered = min(others, default=boundary)
    covered = max(covered, boundary)
    limit = (num_tokens - 1) // unit * unit

    def was_evicted(start: int, groups: Sequence[int]) -> bool:
        return any((g, hashes[b // unit - 1]) in evicted for b in range(start + unit, limit + 1, unit) for g in groups)

    state = [group.group_id for group in index.groups if group.is_state]
    paged = [group.group_id for group in index.groups if not group.is_state]
    # What was evicted under a later hash of the chain was there for everything before it.
    inside = LostReason.EVICTED if was_evicted(boundary, state) else LostReason.NO_BOUNDARY_STATE
    if was_evicted(covered, paged or state):
        beyond = LostReason.EVICTED
    elif covered and index.has_continuation(hashes[covered // unit - 1]):
        beyond = LostReason.DIVERGED
    else:
        beyond = LostReason.NEW
    return HitReport(
        boundary=boundary,
        boundary_by_group=dict(computed.boundary_by_group),
        cached_by_tier={"device": boundary} if boundary else {},
        lost=lost_tokens(num_tokens, unit, boundary, covered, inside, beyond),
    )
