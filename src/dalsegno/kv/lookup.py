"""Finding a hit in the device pool, and saying why it is not longer."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from dalsegno.hit_report import HitReport, LostReason, lost_tokens
from dalsegno.kv.index import PrefixIndex
from dalsegno.kv.layout import GroupSpec
from dalsegno.kv.runs import Match
from dalsegno.kv.tables import ComputedBlocks
from dalsegno.prefix.resolve import covered_up_to, resolve, window_first_block
from dalsegno.types import NULL_BLOCK, BlockHash, GroupKind

__all__ = ["EvictedRing", "explain_hit", "find_hit", "junction_of"]


class EvictedRing:
    """The hashes evicted last, by group: what makes "evicted" a different answer from "never seen"."""

    def __init__(self, num_groups: int, capacity: int = 65_536) -> None:
        """Remember up to `capacity` hashes of each group."""
        self._capacity = capacity
        self._hashes: list[OrderedDict[BlockHash, None]] = [OrderedDict() for _ in range(num_groups)]

    def add(self, group: int, hashes: Sequence[BlockHash]) -> None:
        """Note that `group` no longer vouches for `hashes`."""
        known = self._hashes[group]
        for block_hash in hashes:
            known[block_hash] = None
            known.move_to_end(block_hash)
        while len(known) > self._capacity:
            known.popitem(last=False)

    def has_any(self, group: int, hashes: Sequence[BlockHash]) -> bool:
        """Whether any of `hashes` was evicted from `group` and not forgotten since."""
        known = self._hashes[group]
        return bool(known) and not known.keys().isdisjoint(hashes)

    def clear(self) -> None:
        """Forget everything."""
        for known in self._hashes:
            known.clear()


def find_hit(index: PrefixIndex, root: BlockHash, hashes: Sequence[BlockHash], limit: int) -> ComputedBlocks:
    """The longest joint boundary of a chain in the index, at most `limit`, with the blocks that restore it."""
    limit = min(limit, len(hashes) * index.unit)
    match = index.match(root, hashes, limit)

    def contains(group: int, block_index: int, boundary: int) -> bool:
        return index.vouching(match, group, boundary) != NULL_BLOCK

    resolution = resolve(index.groups, index.unit, limit, contains, _known_without_walking(index, match))
    boundary = resolution.boundary
    tables: list[tuple[int, ...]] = []
    state_block = NULL_BLOCK
    for group in index.groups:
        if group.is_state:
            state_block = index.find_state(hashes[boundary // index.unit - 1]) if boundary else NULL_BLOCK
        tables.append(() if group.is_state or not boundary else _table(index, match, group, boundary))
    return ComputedBlocks(boundary, tuple(tables), state_block, root, hashes, resolution.by_group)


def _known_without_walking(index: PrefixIndex, match: Match) -> dict[int, Callable[[int, int], int]]:
    """The longest boundary of at most a limit, by group, where the runs of a chain tell it."""
    known: dict[int, Callable[[int, int], int]] = {}
    for group in index.groups:
        if group.kind is GroupKind.ATTENTION:
            known[group.group_id] = covered_up_to(index.attention_reach(match))
        elif group.is_state:
            known[group.group_id] = partial(index.last_state, match)
    return known


def _table(index: PrefixIndex, match: Match, group: GroupSpec, boundary: int) -> tuple[int, ...]:
    """The blocks of a paged group that restore `boundary`, with null blocks where it needs none."""
    if group.prefix == "none":
        return (NULL_BLOCK,) * (boundary // group.block_size)
    first = 0 if group.window is None else window_first_block(boundary, group.window, group.block_size)
    return (*(NULL_BLOCK,) * first, *index.table(match, group.group_id, first, boundary))


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
        return any(evicted.has_any(group, hashes[start // unit : limit // unit]) for group in groups)

    state = [group.group_id for group in index.groups if group.is_state]
    paged = [group.group_id for group in index.groups if not group.is_state]
    # What was evicted under a later hash of the chain was there for everything before it.
    inside = LostReason.EVICTED if was_evicted(boundary, state) else LostReason.NO_BOUNDARY_STATE
    if was_evicted(covered, paged or state):
        beyond = LostReason.EVICTED
    elif covered and index.continues(index.match(computed.root, hashes, covered)):
        beyond = LostReason.DIVERGED
    else:
        beyond = LostReason.NEW
    return HitReport(
        boundary=boundary,
        boundary_by_group=dict(computed.boundary_by_group),
        cached_by_tier={"device": boundary} if boundary else {},
        lost=lost_tokens(num_tokens, unit, boundary, covered, inside, beyond),
    )
