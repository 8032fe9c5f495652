"""Which device block vouches for which prefix.

Chains are kept as runs (`kv/runs.py`). Two facts every eviction policy must respect are kept up to date here, each as
one number per run:

* *live*: a boundary state lies at a unit or below it; the same for all units of a run, since states lie at run ends.
  Attention that is not live can serve no hit.
* *reachable*: attention is there for every unit up to this one, a prefix of the run. What is not reachable can serve no
  hit.

A model without state group has only live units, one without attention group only reachable ones. Both facts only ever
end along a chain, so a block is as good as the first unit it vouches for.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import sub

from dalsegno.kv.layout import MemoryLayout
from dalsegno.kv.runs import Match, Run, RunTree
from dalsegno.types import NULL_BLOCK, BlockHash, GroupKind

__all__ = ["PrefixIndex"]


class PrefixIndex:
    """Published blocks by chain and group; one block per unit and group, the first published stays.

    Counts no references and frees nothing. Boundaries are tokens, multiples of the hash unit. Used on the engine thread
    only.

    Attributes:
        on_death: called with (group, blocks) when blocks may have become dead; that one is alive again is not told.
    """

    def __init__(self, layout: MemoryLayout, hash_block_size: int) -> None:
        """Start empty, for the blocks of `layout`."""
        self.unit = hash_block_size
        self.groups = layout.groups
        self.num_blocks = [layout.num_slabs * group.blocks_per_slab for group in layout.groups]
        kinds = {group.kind: group.group_id for group in layout.groups}
        self._attention = kinds.get(GroupKind.ATTENTION)
        self._state = kinds.get(GroupKind.STATE)
        self._paged = [group.group_id for group in layout.paged_groups]
        self._units = [group.block_size // hash_block_size for group in layout.groups]
        self.tree = RunTree(self.num_blocks, self._state)
        self._holders = self.tree.holders
        self.on_death: Callable[[int, Sequence[int]], None] = lambda group, blocks: None

    def __len__(self) -> int:
        """Number of published blocks, all groups."""
        return sum(len(holders) - holders.count(None) for holders in self._holders)

    @property
    def num_units(self) -> int:
        """Units of all chains that hold something or lead to something."""
        return self.tree.num_units

    # Asking by chain.

    def match(self, root: BlockHash, hashes: Sequence[BlockHash], boundary: int) -> Match:
        """Follow a chain up to `boundary`; the answer is for the calls below and valid until the index changes."""
        return self.tree.match(root, hashes, boundary // self.unit)

    def vouching(self, match: Match, group: int, boundary: int) -> int:
        """The block that vouches for a boundary (at least one unit) of a matched chain, or the null block."""
        depth = boundary // self.unit
        if depth > match.depth:
            return NULL_BLOCK
        run = match.run_of(depth)
        if group != self._state:
            return run.blocks[group][depth - run.start - 1]
        return run.state if depth == run.end else NULL_BLOCK

    def find(self, group: int, root: BlockHash, hashes: Sequence[BlockHash], boundary: int) -> int:
        """The block that vouches for `boundary` of a chain, or the null block."""
        return self.vouching(self.match(root, hashes, boundary), group, boundary)

    def find_state(self, block_hash: BlockHash) -> int:
        """The state block kept under a hash, or the null block."""
        run = self.tree.ends.get(block_hash)
        return NULL_BLOCK if run is None else run.state

    def table(self, match: Match, group: int, first_block: int, boundary: int) -> list[int]:
        """The blocks of a paged group that cover a matched chain from block `first_block` to `boundary`.

        The list ends where the match does; a null block stands where nobody vouches for a block up to its end, or to
        `boundary` in the last.
        """
        size, last = self._units[group], min(match.depth, boundary // self.unit)
        table: list[int] = []
        for run in match.runs:
            low, high = max(first_block * size, run.start), min(last, run.end)
            if low < high:
                end = (low // size + 1) * size
                table += run.blocks[group][end - run.start - 1 : high - run.start : size]
        if last % size and last > first_block * size:
            table.append(self.vouching(match, group, last * self.unit))
        return table

    def boundaries(self, match: Match, group: int) -> list[int]:
        """All boundaries of a matched chain that some block of `group` vouches for, rising."""
        depths: list[int] = []
        for run in match.runs:
            if group != self._state:
                depths += (depth for depth, block in enumerate(run.blocks[group], run.start + 1) if block)
            elif run.state:
                depths.append(run.end)
        return [depth * self.unit for depth in depths if depth <= match.depth]

    def attention_reach(self, match: Match) -> int:
        """The longest boundary of a matched chain that the attention group covers."""
        depth = 0
        for run in match.runs:
            depth = run.start + run.reach
            if depth < run.end:
                break
        return self.unit * min(depth, match.depth)

    def last_state(self, match: Match, limit: int, step: int) -> int:
        """The longest boundary of a matched chain with a state, a multiple of `step` and at most `limit`, or 0."""
        for run in reversed(match.runs):
            boundary = run.end * self.unit
            if run.state and run.end <= match.depth and boundary <= limit and boundary % step == 0:
                return boundary
        return 0

    def continues(self, match: Match) -> bool:
        """Whether some chain goes on behind a match of at least one unit with attention."""
        run = match.runs[-1]
        if match.depth < run.end:
            return self._attention is None or run.blocks[self._attention][match.depth - run.start] != NULL_BLOCK
        attention = self._attention
        return any(attention is None or child.blocks[attention][0] for child in run.children.values())

    # Asking by block.

    def is_published(self, group: int, block: int) -> bool:
        """Whether `block` vouches for anything."""
        return self._holders[group][block] is not None

    def published(self, group: int) -> Iterator[int]:
        """All published blocks of a group."""
        return (block for block, run in enumerate(self._holders[group]) if run is not None)

    def select_published(self, group: int, blocks: Iterable[int]) -> list[int]:
        """Those of `blocks` that are published, in their order."""
        holders = self._holders[group]
        return [block for block in blocks if holders[block] is not None]

    def vouched(self, group: int, block: int) -> list[tuple[int, BlockHash]]:
        """(boundary, hash) of all that `block` vouches for, by rising boundary."""
        return [(depth * self.unit, run.hash_at(depth)) for run, depth in self._units_of(group, block)][::-1]

    def is_dead(self, group: int, block: int) -> bool:
        """Whether no hit can ever use the published `block` as things stand."""
        run = self._holders[group][block]
        assert run is not None, f"block {block} of group {group} is not published"
        if group == self._state:
            return not self._is_reachable(run, run.end)
        run, depth = self._first_unit(group, block, run)
        return not (self._is_live(run) and self._is_reachable(run, depth))

    # Changing.

    def publish(self, group: int, root: BlockHash, hashes: Sequence[BlockHash], boundary: int, block: int) -> int:
        """Let `block` vouch for `boundary` of the chain `hashes`; its bytes must be written by now.

        A paged block vouches for the boundaries before it in the same block too, where nobody does: blocks are
        append-only.

        Returns:
            The block that vouches for it: `block`, or the one published first, which stays.
        """
        if group == self._state:
            return self._publish_state(root, hashes, boundary // self.unit, block)
        start = boundary - self.unit
        run, _ = self._publish(group, root, hashes, start, boundary, [block], start // self.groups[group].block_size)
        return run.blocks[group][boundary // self.unit - run.start - 1]

    def publish_range(
        self, group: int, root: BlockHash, hashes: Sequence[BlockHash], start: int, end: int, table: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Publish the blocks of a request's `table` for the boundaries in `(start, end]`, as `publish` for each.

        Returns:
            (position, block) where another block vouches for the end of a block that is full now.
        """
        size = self.groups[group].block_size
        while end > start and table[(end - 1) // size] == NULL_BLOCK:
            end = max(start, (end - 1) // size * size)
        if end == start:
            return []
        run, is_complete = self._publish(group, root, hashes, start, end, table, 0)
        others: list[tuple[int, int]] = []
        if is_complete:
            return others
        for position in range(end // size - 1, start // size - 1, -1):
            depth = (position + 1) * self._units[group]
            while run.start >= depth:
                assert run.parent is not None, "a published chain does not lead to its root"
                run = run.parent
            block = run.blocks[group][depth - run.start - 1]
            if table[position] and block != table[position]:
                others.append((position, block))
        return others[::-1]

    def unpublish(self, group: int, block: int) -> list[BlockHash]:
        """Take everything `block` vouches for back; returns the hashes nobody vouches for any more.

        A unit that a longer block of the same chain also covers passes to that block, so that dropping a duplicate
        tail costs no boundary.
        """
        run = self._holders[group][block]
        if run is None:
            return []
        units = list(self._units_of(group, block))
        self._holders[group][block] = None
        self.tree.deepest[group][block] = 0
        lost = []
        for holder, depth in units:
            heir = self._heir(group, holder, depth)
            if group == self._state:
                holder.state = NULL_BLOCK
            else:
                holder.blocks[group][depth - holder.start - 1] = heir
            if not heir:
                lost.append((holder, depth))
        if group == self._state and not run.live_children:
            self._put_to_sleep(run)
        if group == self._attention and lost:
            self._cut_reach(*lost[-1])
        hashes = [holder.hash_at(depth) for holder, depth in lost]
        self.tree.prune(run)
        return hashes

    def clear(self) -> None:
        """Forget everything."""
        self.tree.clear()

    # Paged blocks.

    def _publish(
        self,
        group: int,
        root: BlockHash,
        hashes: Sequence[BlockHash],
        start: int,
        end: int,
        table: Sequence[int],
        first_block: int,
    ) -> tuple[Run, bool]:
        """Fill the units in `(start, end]` from `table`, which begins with block `first_block`.

        Returns:
            (the run that holds the last unit, whether nobody but the table's blocks vouches for any of them).
        """
        first, last = start // self.unit, end // self.unit
        run = last_run = self.tree.reserve(root, hashes, first, last)
        runs = [run]
        while run.start > first:
            assert run.parent is not None, "a chain does not lead to its root"
            run = run.parent
            runs.append(run)
        is_complete = True
        for run in reversed(runs):
            is_complete &= self._fill(group, run, max(first, run.start), min(last, run.end), table, first_block)
        if first % self._units[group]:
            self._fill_back(group, runs, first, table[first // self._units[group] - first_block])
        if group == self._attention:
            for run in reversed(runs):
                self._extend_reach(run)
        return last_run, is_complete

    def _fill(self, group: int, run: Run, low: int, high: int, table: Sequence[int], first_block: int) -> bool:
        """Let the blocks of `table` vouch for the units `(low, high]` of `run`, if nobody does; whether nobody did.

        If somebody does, the blocks get the other units.
        """
        size, column = self._units[group], run.blocks[group]
        holders, deepest = self._holders[group], self.tree.deepest[group]
        if column[low - run.start : high - run.start].tobytes().strip(b"\0"):
            for depth in range(low + 1, high + 1):
                block = table[(depth - 1) // size - first_block]
                if block and not column[depth - run.start - 1]:
                    column[depth - run.start - 1] = block
                    holders[block], deepest[block] = run, depth
            return False
        blocks: Iterable[int] = table[low // size - first_block : (high - 1) // size + 1 - first_block]
        ends = [*range((low // size + 1) * size, high, size), high]
        for block, end in zip(blocks, ends, strict=True):
            if block:
                holders[block] = run
                deepest[block] = end
        if size > 1:
            blocks = chain.from_iterable(map(repeat, blocks, map(sub, ends, [low, *ends])))
        column[low - run.start : high - run.start] = array("i", blocks)
        return True

    def _fill_back(self, group: int, runs: list[Run], first: int, block: int) -> None:
        """Let the block that took the unit behind `first` vouch for those before it in the same block, if nobody does.

        Where a unit has a block, all units before it in that block have one too. Runs that are changed are added to
        `runs`.
        """
        run = runs[-1]
        if not block or run.blocks[group][first - run.start] != block:
            return
        for depth in range(first, first - first % self._units[group], -1):
            if depth == run.start:
                assert run.parent is not None, "a chain does not lead to its root"
                run = run.parent
                runs.append(run)
            if run.blocks[group][depth - run.start - 1]:
                return
            run.blocks[group][depth - run.start - 1] = block

    def _units_of(self, group: int, block: int) -> Iterator[tuple[Run, int]]:
        """(run, depth) of all units that `block` vouches for, by falling depth."""
        run = self._holders[group][block]
        if run is None:
            return
        if group == self._state:
            yield run, run.end
            return
        last = self.tree.deepest[group][block]
        for depth in range(last, (last - 1) // self._units[group] * self._units[group], -1):
            while depth == run.start:
                assert run.parent is not None, "a published chain does not lead to its root"
                run = run.parent
            if run.blocks[group][depth - run.start - 1] == block:
                yield run, depth

    def _first_unit(self, group: int, block: int, run: Run) -> tuple[Run, int]:
        """Where the first unit lies that `block` vouches for; `run` holds the last."""
        depth = self.tree.deepest[group][block]
        start = (depth - 1) // self._units[group] * self._units[group]
        if depth == start + 1:
            return run, depth
        if start >= run.start:
            return run, run.start + 1 + run.blocks[group].index(block, start - run.start)
        return list(self._units_of(group, block))[-1]

    def _heir(self, group: int, run: Run, depth: int) -> int:
        """A block of the chain behind a unit that covers the unit's own block index too, or the null block."""
        if group == self._state or depth % self._units[group] == 0:
            return NULL_BLOCK
        if depth < run.end:
            return run.blocks[group][depth - run.start]
        return next((child.blocks[group][0] for child in run.children.values() if child.blocks[group][0]), NULL_BLOCK)

    # States.

    def _publish_state(self, root: BlockHash, hashes: Sequence[BlockHash], depth: int, block: int) -> int:
        run = self.tree.ends.get(hashes[depth - 1])
        if run is None:
            run = self.tree.reserve(root, hashes, depth - 1, depth)
            if depth < run.end:
                self.tree.split(run, depth)
        if run.state:
            return run.state
        was_live = run.has_state
        run.state = block
        assert self._state is not None, "a state is published without a state group"
        self._holders[self._state][block] = run
        self.tree.deepest[self._state][block] = depth
        if not was_live:
            self._wake(run)
        return block

    # Facts.

    def _is_live(self, run: Run) -> bool:
        return self._state is None or run.live_children > 0 or run.state != NULL_BLOCK

    def _is_reachable(self, run: Run, depth: int) -> bool:
        return self._attention is None or depth <= run.start + run.reach

    def _wake(self, run: Run) -> None:
        """`run` became live: tell those before it, up to the first that was live already."""
        parent = run.parent
        while parent is not None:
            parent.live_children += 1
            if parent.live_children > 1 or parent.state:
                return
            parent = parent.parent

    def _put_to_sleep(self, run: Run) -> None:
        """`run` is live no more: tell those before it, up to the first that stays live."""
        self._announce(run, 0, run.size)
        parent = run.parent
        while parent is not None:
            parent.live_children -= 1
            if parent.has_state:
                return
            self._announce(parent, 0, parent.size)
            parent = parent.parent

    def _extend_reach(self, run: Run) -> None:
        """Attention was published in `run`: see how far it reaches now, there and behind."""
        assert self._attention is not None, "without attention everything is reachable"
        pending = [run]
        while pending:
            run = pending.pop()
            if run.parent is None or run.parent.reach < run.parent.size:
                continue
            column, before = run.blocks[self._attention], run.reach
            try:
                run.reach = column.index(NULL_BLOCK, before)
            except ValueError:
                run.reach = len(column)
            if before < run.reach == run.size:
                pending += run.children.values()

    def _cut_reach(self, run: Run, depth: int) -> None:
        """The attention of the unit at `depth` is gone: nothing from there on can be reached."""
        pending = [(run, depth - run.start - 1)]
        while pending:
            run, reach = pending.pop()
            if run.reach > reach:
                self._announce(run, reach, run.reach)
                if run.reach == run.size:
                    pending += ((child, 0) for child in run.children.values())
                run.reach = reach

    def _announce(self, run: Run, low: int, high: int) -> None:
        """Tell that what lies in `run` between two offsets may have died."""
        for group in self._paged:
            blocks = set(run.blocks[group][low:high])
            blocks.discard(NULL_BLOCK)
            if blocks:
                self.on_death(group, list(blocks))
        if self._state is not None and run.state and high == run.size:
            self.on_death(self._state, [run.state])
