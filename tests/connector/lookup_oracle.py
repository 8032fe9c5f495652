"""What device and store can restore together, by trying every boundary: the oracle of `find_in_store`."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import lcm

from dalsegno.connector.store.lookup import LookupQuery, StoreMatch, find_in_store
from dalsegno.connector.store.messages import ObjectRef, StoredObject
from dalsegno.connector.store.objects import ObjectMap
from dalsegno.kv.layout import GroupSpec, MemoryLayout
from dalsegno.prefix.resolve import window_first_block
from dalsegno.types import BlockHash, GroupKind

__all__ = ["Key", "Prefix", "hash_at"]

Key = tuple[int, int]
"""(group, boundary) of a stored object."""


def hash_at(boundary: int) -> BlockHash:
    return BlockHash(boundary.to_bytes(32, "big"))


@dataclass
class Prefix:
    """One prompt of `num_tokens` tokens, what the device has of it, and a store.

    Attributes:
        size: tokens per object of full attention.
        stored: keys in the store.
        reach: by attention group, tokens on the device.
        held: (group, boundary) of other groups on the device.
        asked: every question, a list of keys each.
        confirmed: keys for which the last question got a yes.
        vanishing: keys that are gone once they were asked for.
    """

    layout: MemoryLayout
    unit: int
    size: int
    num_tokens: int
    stored: set[Key]
    reach: dict[int, int] = field(default_factory=dict)
    held: Collection[Key] = ()
    local_boundary: int = 0
    predicted: Sequence[int] = ()
    excluded: Collection[Key] = ()
    vanishing: Collection[Key] = ()
    asked: list[list[Key]] = field(default_factory=list)
    confirmed: set[Key] = field(default_factory=set)

    def find(self, max_state_probes: int = 10_000) -> StoreMatch | None:
        """Look up; None where the store has nothing beyond the local hit."""
        query = LookupQuery(
            hashes=[hash_at(end) for end in range(self.unit, self.num_tokens + 1, self.unit)],
            salt="",
            limit=self.num_tokens - 1,
            local_boundary=self.local_boundary,
            local_reach=self.reach,
            held={g.group_id: frozenset(e for i, e in self.held if i == g.group_id) for g in self.layout.groups},
            predicted=self.predicted,
            excluded=frozenset(self._ref(key) for key in self.excluded),
        )
        match = find_in_store(self.layout, self.unit, self.objects, query, self._exists, max_state_probes)
        assert match.boundary >= self.local_boundary
        return match if match.boundary > self.local_boundary else None

    def restorable(self, boundary: int, stored: Collection[Key]) -> bool:
        """Whether every group can be restored at `boundary` from the device and these keys."""
        groups = [group for group in self.layout.groups if group.prefix != "none"]
        return all(self._restores(group, boundary, stored) for group in groups)

    def best(self, stored: Collection[Key]) -> int:
        """The longest joint boundary beyond the local one; 0 for none."""
        step = lcm(self.unit, *(g.block_size for g in self.layout.groups if g.prefix == "block"))
        known = {key for key in stored if key not in self.excluded}
        candidates = range(step, self.num_tokens, step)
        return max((p for p in candidates if p > self.local_boundary and self.restorable(p, known)), default=0)

    def check(self, match: StoreMatch, stored: Iterable[Key]) -> None:
        """A match reads only what is there, and that restores its boundary."""
        reads = {(item.group_id, item.boundary) for item in match.objects}
        assert len(reads) == len(match.objects), "an object is read twice"
        assert reads <= set(stored) - set(self.excluded)
        assert self.restorable(match.boundary, reads)
        for key in reads:
            assert not self.restorable(match.boundary, reads - {key}), f"{key} is read for nothing"

    @property
    def objects(self) -> ObjectMap:
        return ObjectMap(self.layout, self.size)

    def _restores(self, group: GroupSpec, boundary: int, stored: Collection[Key]) -> bool:
        held = {end for index, end in self.held if index == group.group_id}
        ends = {end for index, end in stored if index == group.group_id and end <= self.num_tokens}
        if group.is_state:
            return boundary in held | ends
        size = group.block_size if group.window is not None else self.size
        first, reach = 0, 0
        if group.window is not None:
            first = window_first_block(boundary, group.window, size) * size
        else:
            reach = self.reach.get(group.group_id, 0)
        for start in range(first, boundary, size):
            needed = min(start + size, boundary)
            there = reach >= needed or needed in held or any(needed <= end <= start + size for end in ends)
            if not there:
                return False
        return True

    def _exists(self, salt: str, objects: Sequence[StoredObject]) -> list[bool]:
        keys = [(item.group_id, item.boundary) for item in objects]
        for item in objects:
            group = self.layout.groups[item.group_id]
            size = {GroupKind.STATE: item.boundary, GroupKind.WINDOW: group.block_size}.get(group.kind, self.size)
            assert item.block_hash == hash_at(item.boundary)
            assert item.first_token == (item.boundary - 1) // size * size
        assert not set(keys) & set(self.excluded), "an object that failed before is asked for"
        self.asked.append(keys)
        answers = [key in self.stored for key in keys]
        self.confirmed = {key for key, there in zip(keys, answers, strict=True) if there}
        self.stored -= set(keys) & set(self.vanishing)
        return answers

    def _ref(self, key: Key) -> ObjectRef:
        return key[0], hash_at(key[1])
