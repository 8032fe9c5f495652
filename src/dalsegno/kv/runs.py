"""The prefix tree as runs: units of one chain between two points where chains part or a state is kept.

A run holds its units' digests in one blob and, per paged group, the block that vouches for each unit in one array; a
state hangs at the end of its run. Since a hash names the whole prefix, two chains agree as far as their hashes at one
unit do, so a lookup compares one digest per run. Depths count units from the root of a key domain.

What is here is structure: finding, growing, parting and pruning chains. What it means is `kv/index.py`.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dalsegno.types import NULL_BLOCK, BlockHash

__all__ = ["Match", "Run", "RunTree"]

_DIGEST_BYTES = 32


class Run:
    """Units `(start, end]` of a chain.

    Attributes:
        start, end: depth of the last unit before, and of the last unit; both 0 for the root of a key domain.
        first: hash of the first unit, or the root's.
        digests: hashes of all units, one behind the other.
        blocks: per group, for each unit the block that vouches for it or the null block; empty for a state group.
        state: the state block kept at `end`, or the null block.
        parent, children: the run before and those behind, by the hash of their first unit.
        live_children: children with a state at their end or below.
        reach: units from the start that attention covers without a hole, also before this run.
    """

    __slots__ = (
        "blocks",
        "children",
        "digests",
        "end",
        "first",
        "live_children",
        "parent",
        "reach",
        "start",
        "state",
    )

    def __init__(self, first: BlockHash, parent: "Run | None", start: int, num_groups: int) -> None:
        """Start without units; the caller enters it in the children."""
        self.start = self.end = start
        self.first = first
        self.digests = bytearray()
        self.blocks = [array("i") for _ in range(num_groups)]
        self.state = NULL_BLOCK
        self.parent = parent
        self.children: dict[BlockHash, Run] = {}
        self.live_children = 0
        self.reach = 0

    @property
    def size(self) -> int:
        """Number of units."""
        return self.end - self.start

    @property
    def has_state(self) -> bool:
        """Whether a state is kept at the end or below."""
        return self.live_children > 0 or self.state != NULL_BLOCK

    def hash_at(self, depth: int) -> BlockHash:
        """The hash of the unit at `depth`; of the root for a run without units."""
        end = _DIGEST_BYTES * (depth - self.start)
        return BlockHash(bytes(self.digests[end - _DIGEST_BYTES : end])) if end else self.first


@dataclass(frozen=True, slots=True)
class Match:
    """How far a chain is known: its first `depth` units, in `runs` one behind the other; valid until a change."""

    runs: Sequence[Run]
    depth: int

    def run_of(self, depth: int) -> Run:
        """The run that holds a known unit."""
        return self.runs[bisect_left(self.runs, depth, key=_end)]


class RunTree:
    """All chains of all key domains, and where each published block lies. Used on the engine thread only.

    Attributes:
        ends: every run by the hash of its last unit, roots by their own.
        num_units: units of all runs.
        holders, deepest: per group and block, the run and depth of the deepest unit the block vouches for; None and 0
            for a block that vouches for nothing.
    """

    def __init__(self, num_blocks: Sequence[int], state: int | None) -> None:
        """Start empty, for block ids below `num_blocks[g]`; `state` is the state group, the others are paged."""
        self._state = state
        self._paged = [group for group in range(len(num_blocks)) if group != state]
        self._num_groups = len(num_blocks)
        self.ends: dict[BlockHash, Run] = {}
        self.num_units = 0
        self.holders: list[list[Run | None]] = [[None] * count for count in num_blocks]
        self.deepest = [array("i", bytes(4 * count)) for count in num_blocks]

    def __iter__(self) -> Iterator[Run]:
        """All runs, roots too."""
        return iter(self.ends.values())

    def match(self, root: BlockHash, hashes: Sequence[BlockHash], limit: int) -> Match:
        """Follow a chain as far as it is known, at most `limit` units."""
        run = self.ends.get(root)
        return Match((), 0) if run is None else self._descend(run, hashes, limit)

    def reserve(self, root: BlockHash, hashes: Sequence[BlockHash], start: int, end: int) -> Run:
        """Make the first `end` units of a chain known, unvouched for where they are new.

        Args:
            root: hash of zero tokens in the chain's key domain.
            hashes: of the chain's units.
            start: a depth at which a run is likely to end; where one does, the chain is not followed from its root.
            end: at least 1.

        Returns:
            The run that holds the unit at `end`.
        """
        run = self.ends.get(hashes[start - 1]) if start else None
        if run is None:
            run = self.ends.get(root)
        if run is None:
            run = self.ends[root] = Run(root, None, 0, self._num_groups)
        match = self._descend(run, hashes, end)
        run = match.runs[-1] if match.runs else run
        if match.depth == end:
            return run
        if match.depth < run.end:
            self.split(run, match.depth)
        if run.parent is None or run.children or run.state:
            parent, first = run, hashes[match.depth]
            run = parent.children[first] = Run(first, parent, match.depth, self._num_groups)
        else:
            del self.ends[run.hash_at(run.end)]
        self._append(run, hashes[match.depth : end])
        return run

    def split(self, run: Run, depth: int) -> None:
        """Let `run` end at `depth`, strictly inside; what lies behind becomes a run of its own below it."""
        kept = depth - run.start
        tail = Run(run.hash_at(depth + 1), run, depth, self._num_groups)
        tail.end, run.end = run.end, depth
        tail.digests = run.digests[_DIGEST_BYTES * kept :]
        del run.digests[_DIGEST_BYTES * kept :]
        tail.state, run.state = run.state, NULL_BLOCK
        tail.children, run.children = run.children, {tail.first: tail}
        for child in tail.children.values():
            child.parent = tail
        tail.live_children, run.live_children = run.live_children, int(run.live_children > 0 or tail.state > 0)
        tail.reach, run.reach = max(0, run.reach - kept), min(run.reach, kept)
        self.ends[tail.hash_at(tail.end)] = tail
        self.ends[run.hash_at(depth)] = run
        for group in self._paged:
            tail.blocks[group] = run.blocks[group][kept:]
            del run.blocks[group][kept:]
        self._rehome(tail, run)

    def prune(self, run: Run) -> None:
        """Remove the units at the end of `run`, and before it, that hold nothing and lead nowhere."""
        while not run.children and not run.state:
            end = run.end
            while end > run.start and not any(run.blocks[group][end - run.start - 1] for group in self._paged):
                end -= 1
            if end == run.end > run.start:
                return
            del self.ends[run.hash_at(run.end)]
            self._truncate(run, end)
            if end > run.start:
                self.ends[run.hash_at(end)] = run
                return
            if run.parent is None:
                return
            del run.parent.children[run.first]
            run = run.parent

    def clear(self) -> None:
        """Forget everything."""
        self.ends.clear()
        self.num_units = 0
        for holders, deepest in zip(self.holders, self.deepest, strict=True):
            holders[:] = [None] * len(holders)
            deepest[:] = array("i", bytes(4 * len(deepest)))

    def _descend(self, run: Run, hashes: Sequence[BlockHash], limit: int) -> Match:
        """Follow a chain from the end of `run`, which lies on it."""
        runs: list[Run] = []
        depth = run.end
        while depth < limit:
            child = run.children.get(hashes[depth])
            if child is None:
                break
            runs.append(child)
            depth = self._common_depth(child, hashes, limit)
            if depth < child.end:
                break
            run = child
        return Match(runs, depth)

    def _common_depth(self, run: Run, hashes: Sequence[BlockHash], limit: int) -> int:
        """The deepest unit of `run`, at most `limit`, that lies on a chain which its first unit lies on."""
        high = min(run.end, limit)
        if run.hash_at(high) == hashes[high - 1]:
            return high
        low = run.start + 1
        while low + 1 < high:
            middle = (low + high) // 2
            if run.hash_at(middle) == hashes[middle - 1]:
                low = middle
            else:
                high = middle
        return low

    def _append(self, run: Run, hashes: Sequence[BlockHash]) -> None:
        run.digests += b"".join(hashes)
        for group in self._paged:
            run.blocks[group].frombytes(bytes(4 * len(hashes)))
        run.end += len(hashes)
        self.num_units += len(hashes)
        self.ends[hashes[-1]] = run

    def _truncate(self, run: Run, end: int) -> None:
        kept = end - run.start
        self.num_units -= run.size - kept
        del run.digests[_DIGEST_BYTES * kept :]
        for group in self._paged:
            del run.blocks[group][kept:]
        run.end = end
        run.reach = min(run.reach, kept)

    def _rehome(self, tail: Run, old: Run) -> None:
        """Note that what lay deepest in `old` behind its new end lies in `tail` now."""
        for group in self._paged:
            holders, deepest = self.holders[group], self.deepest[group]
            for block in set(tail.blocks[group]):
                if block and holders[block] is old and deepest[block] > tail.start:
                    holders[block] = tail
        if self._state is not None and tail.state:
            self.holders[self._state][tail.state] = tail


def _end(run: Run) -> int:
    return run.end
