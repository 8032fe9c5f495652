"""The longest boundary that device and store can restore together, and what must be read for it.

Attention is asked for first: a gallop over full objects, then the partial ones behind them. States are asked for only
below what attention reaches, predicted boundaries first, then from the top in growing batches. The gallop only bounds
the search, since objects go missing in any order: the boundary that `resolve` finds is confirmed by asking for every
object its load will read, and a hole makes it resolve again. Pure but for the questions to the store.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from dalsegno.connector.store.messages import ObjectRef, StoredObject
from dalsegno.connector.store.objects import ObjectMap
from dalsegno.kv.layout import GroupSpec, MemoryLayout
from dalsegno.prefix.resolve import covered_up_to, resolve, window_first_block
from dalsegno.types import BlockHash, GroupKind

__all__ = ["Exists", "LookupQuery", "StoreMatch", "find_in_store"]

Exists = Callable[[str, Sequence[StoredObject]], Sequence[bool]]
"""Asks for (salt, objects): whether every rank's part of each is stored. Never raises; an error is a no."""

_FIRST_BATCH = 8


@dataclass(frozen=True, slots=True)
class LookupQuery:
    """One prompt, and what the device has of it.

    Attributes:
        hashes: of all its full units.
        salt: tag of its key domain.
        limit: largest boundary it may resume at.
        local_boundary: its joint local hit.
        local_reach: by attention group, tokens the device has.
        held: by other group, the boundaries the device vouches for.
        predicted: boundaries at which a state is likely.
        excluded: objects that failed to load before.
    """

    hashes: Sequence[BlockHash]
    salt: str
    limit: int
    local_boundary: int
    local_reach: Mapping[int, int]
    held: Mapping[int, frozenset[int]]
    predicted: Sequence[int] = ()
    excluded: frozenset[ObjectRef] = frozenset()


@dataclass(frozen=True, slots=True)
class StoreMatch:
    """What device and store have together.

    Attributes:
        boundary: the longest joint boundary; the local one where the store has nothing beyond it.
        objects: what to read for it, without blocks.
        shared: how far attention alone reaches; somebody else's prompt went on from there, or ended.
        unsure: whether the store did not answer some question.
    """

    boundary: int
    objects: tuple[StoredObject, ...]
    shared: int
    unsure: bool = False


def find_in_store(
    layout: MemoryLayout,
    unit: int,
    objects: ObjectMap,
    query: LookupQuery,
    exists: Exists,
    max_state_probes: int,
) -> StoreMatch:
    """Find the longest joint boundary, and what must be read for it.

    Args:
        layout: groups of the engine.
        unit: H, in tokens.
        objects: how prefixes are cut.
        query: the prompt.
        exists: the store.
        max_state_probes: most boundaries that are asked for states.
    """
    return _Search(layout, unit, objects, query, exists, max_state_probes).run()


class _Search:
    """One lookup: what the store was asked so far."""

    def __init__(
        self,
        layout: MemoryLayout,
        unit: int,
        objects: ObjectMap,
        query: LookupQuery,
        exists: Exists,
        max_state_probes: int,
    ) -> None:
        self._groups = layout.groups
        self._unit = unit
        self._objects = objects
        self._query = query
        self._exists = exists
        self._probes_left = max_state_probes
        self._batch = _FIRST_BATCH
        self._known_tokens = len(query.hashes) * unit
        limit = min(query.limit, self._known_tokens)
        self._limit = limit - limit % unit
        self._present: dict[tuple[int, int], bool] = {}

    def run(self) -> StoreMatch:
        while True:
            reach = {
                group.group_id: self._attention_reach(group)
                for group in self._groups
                if group.kind is GroupKind.ATTENTION and group.prefix != "none"
            }
            local = self._query.local_boundary
            limit = min([self._limit, *reach.values()])
            shared = max(limit, local) if reach else local
            if limit <= local:
                return StoreMatch(local, (), shared)
            self._predict_states(limit)
            known = {group_id: covered_up_to(end) for group_id, end in reach.items()}
            boundary = resolve(self._groups, self._unit, limit, self._contains, known).boundary
            if boundary <= local:
                return StoreMatch(local, (), shared)
            found = self._to_read(boundary)
            if self._confirm(found):
                return StoreMatch(boundary, tuple(found), shared)

    def _attention_reach(self, group: GroupSpec) -> int:
        """How far device and store cover attention, at most the limit."""
        size = self._objects.size(group)
        local = self._query.local_reach.get(group.group_id, 0)
        index, last, batch = local // size, self._known_tokens // size, _FIRST_BATCH
        while index < last:
            ends = [(i + 1) * size for i in range(index, min(index + batch, last))]
            self._ask(group, ends)
            there = next((i for i, end in enumerate(ends) if not self._has(group, end)), len(ends))
            index += there
            if there < len(ends):
                break
            batch *= 2
        covered = max(index * size, local)
        partial = self._partial_ends(index * size, size, covered)
        self._ask(group, partial)
        covered = max([covered, *(end for end in partial if self._has(group, end))])
        return min(covered, self._limit)

    def _partial_ends(self, start: int, size: int, above: int) -> list[int]:
        """Boundaries above `above` at which a partial object that begins at `start` can end."""
        first = above - above % self._unit + self._unit
        return list(range(max(first, start + self._unit), min(start + size, self._known_tokens + 1), self._unit))

    def _predict_states(self, limit: int) -> None:
        for group in self._groups:
            if group.is_state and group.prefix != "none":
                likely = {b - b % self._unit for b in self._query.predicted}
                ends = sorted((b for b in likely if self._query.local_boundary < b <= limit), reverse=True)
                self._probe(group, ends[: self._probes_left])

    def _probe(self, group: GroupSpec, ends: Sequence[int]) -> None:
        new = [end for end in ends if (group.group_id, end) not in self._present]
        self._probes_left -= len(new)
        self._ask(group, new)

    def _contains(self, group: int, block_index: int, boundary: int) -> bool:
        if boundary in self._query.held.get(group, ()):
            return True
        spec = self._groups[group]
        if spec.is_state:
            return self._has_state(spec, boundary)
        return self._vouching_end(spec, block_index, boundary) is not None

    def _has_state(self, group: GroupSpec, boundary: int) -> bool:
        if boundary <= self._query.local_boundary:
            return False
        if (group.group_id, boundary) not in self._present and self._probes_left > 0:
            below = range(boundary, self._query.local_boundary, -self._unit)
            self._probe(group, list(islice(below, min(self._batch, self._probes_left))))
            self._batch *= 2
        return self._has(group, boundary)

    def _vouching_end(self, group: GroupSpec, block_index: int, boundary: int) -> int | None:
        """Where an object of block `block_index` of a window group ends that vouches for `boundary`, if one is stored.

        The longest first: it serves the most boundaries.
        """
        start, size = block_index * group.block_size, group.block_size
        ends = [end for end in (start + size,) if end <= self._known_tokens]
        ends += reversed([end for end in self._partial_ends(start, size, start) if end >= boundary])
        self._ask(group, ends)
        return next((end for end in ends if self._has(group, end)), None)

    def _to_read(self, boundary: int) -> list[StoredObject]:
        """The objects whose bytes restore `boundary` together with what the device has."""
        found: list[StoredObject] = []
        for group in self._objects.groups:
            held = self._query.held.get(group.group_id, frozenset())
            if group.is_state:
                ends = [] if boundary in held else [boundary]
            elif group.window is None:
                ends = self._attention_ends(group, boundary)
            else:
                ends = self._window_ends(group, boundary, held)
            found += (self._named(group, end) for end in ends)
        return found

    def _attention_ends(self, group: GroupSpec, boundary: int) -> list[int]:
        local = self._query.local_reach.get(group.group_id, 0)
        if local >= boundary:
            return []
        ends = []
        for start, end in self._objects.cover(group, local, boundary):
            size = self._objects.size(group)
            candidates = [e for e in (start + size, *self._partial_ends(start, size, start)) if e >= end]
            ends.append(next(e for e in candidates if self._has(group, e)))
        return ends

    def _window_ends(self, group: GroupSpec, boundary: int, held: frozenset[int]) -> list[int]:
        assert group.window is not None, "a window group has a window"
        size = group.block_size
        ends = []
        for block in range(window_first_block(boundary, group.window, size), -(-boundary // size)):
            if min((block + 1) * size, boundary) not in held:
                end = self._vouching_end(group, block, min((block + 1) * size, boundary))
                assert end is not None, "resolve found a window block that is not there"
                ends.append(end)
        return ends

    def _confirm(self, found: Sequence[StoredObject]) -> bool:
        """Ask for everything that will be read, in one batch, and remember what has gone."""
        answers = self._exists(self._query.salt, found)
        for item, there in zip(found, answers, strict=True):
            self._present[item.group_id, item.boundary] = there
        return all(answers)

    def _ask(self, group: GroupSpec, ends: Sequence[int]) -> None:
        new = [self._named(group, end) for end in ends if (group.group_id, end) not in self._present]
        asked = [item for item in new if item.ref not in self._query.excluded]
        self._present.update(((item.group_id, item.boundary), False) for item in new)
        if asked:
            answers = self._exists(self._query.salt, asked)
            self._present.update(
                ((item.group_id, item.boundary), there) for item, there in zip(asked, answers, strict=True)
            )

    def _has(self, group: GroupSpec, end: int) -> bool:
        return self._present.get((group.group_id, end), False)

    def _named(self, group: GroupSpec, end: int) -> StoredObject:
        first = self._objects.first_token(group, end)
        return StoredObject(group.group_id, first, end, self._query.hashes[end // self._unit - 1])
