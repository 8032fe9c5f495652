"""The prefix index against a dictionary of what every block was published for."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dalsegno.hashing.block_hash import extend_block_hashes, root_hash, to_token_array
from dalsegno.kv.index import PrefixIndex
from dalsegno.kv.runs import Match
from dalsegno.testing.builders import make_cut
from dalsegno.types import NULL_BLOCK, BlockHash, GroupKind

UNIT = 4
MAX_UNITS = 9
MAX_BLOCKS = 2000

Prefix = tuple[int, ...]
"""A prefix by its units; equal numbers are equal tokens."""


@dataclass
class Writer:
    """Somebody who computes a chain into blocks of his own, as a request does."""

    prefix: Prefix
    tables: dict[int, list[int]]
    """Paged group to its blocks; the null block where the chain was not his when he came."""


class IndexMachine(RuleBasedStateMachine):
    """Writers publish, blocks are taken back; the model knows for which prefixes each block was ever accepted."""

    @initialize(kinds=st.sampled_from(["a", "s", "as", "w", "ws", "aws"]), units_per_block=st.sampled_from([1, 2, 4]))
    def start(self, kinds: str, units_per_block: int) -> None:
        layout = make_cut(
            kinds,
            [1] * len(kinds),
            num_slabs=MAX_BLOCKS,
            block_size=UNIT * units_per_block,
            hash_block_size=UNIT,
            window=6,
        )
        self.groups = layout.groups
        self.units_per_block = units_per_block
        self.index = PrefixIndex(layout, UNIT)
        self.index.on_death = lambda group, blocks: self.announced.update((group, block) for block in blocks)
        self.announced: set[tuple[int, int]] = set()
        self.accepted: dict[tuple[int, int], set[Prefix]] = {}
        self.writers: list[Writer] = []
        self.num_blocks = 0
        self.root = root_hash(UNIT)

    # The model.

    def covers(self, group: int, block: int, prefix: Prefix) -> bool:
        """Append-only: a paged block accepted for a longer prefix of the same block vouches for the shorter one."""
        if self.groups[group].is_state:
            return prefix in self.accepted[group, block]
        place = (len(prefix) - 1) // self.units_per_block
        return any(
            longer[: len(prefix)] == prefix and (len(longer) - 1) // self.units_per_block == place
            for longer in self.accepted[group, block]
        )

    def vouching(self, group: int, prefix: Prefix) -> set[int]:
        return {block for g, block in self.accepted if g == group and self.covers(g, block, prefix)}

    def prefixes(self) -> set[Prefix]:
        """Every prefix that some block vouches for."""
        longest = {prefix for accepted in self.accepted.values() for prefix in accepted}
        shorter = {prefix[:count] for prefix in longest for count in range(1, len(prefix) + 1)}
        return {p for p in shorter if any(self.vouching(group.group_id, p) for group in self.groups)}

    def group_of(self, kind: GroupKind) -> int | None:
        return next((group.group_id for group in self.groups if group.kind is kind), None)

    def is_reachable(self, prefix: Prefix) -> bool:
        attention = self.group_of(GroupKind.ATTENTION)
        return attention is None or all(self.vouching(attention, prefix[:i]) for i in range(1, len(prefix) + 1))

    def is_live(self, prefix: Prefix) -> bool:
        state = self.group_of(GroupKind.STATE)
        if state is None:
            return True
        kept = [p for (g, _), accepted in self.accepted.items() if g == state for p in accepted]
        return any(longer[: len(prefix)] == prefix for longer in kept)

    def find(self, group: int, prefix: Prefix) -> int:
        return self.index.find(group, self.root, self.hashes(prefix), len(prefix) * UNIT)

    def match(self, prefix: Prefix) -> Match:
        return self.index.match(self.root, self.hashes(prefix), len(prefix) * UNIT)

    def hashes(self, prefix: Prefix) -> list[BlockHash]:
        hashes: list[BlockHash] = []
        tokens = to_token_array(unit for unit in prefix for _ in range(UNIT))
        extend_block_hashes(self.root, hashes, tokens, UNIT)
        return hashes

    # What happens to the index.

    def publish(self, group: int, prefix: Prefix, block: int) -> None:
        there = self.vouching(group, prefix)
        found = self.index.publish(group, self.root, self.hashes(prefix), len(prefix) * UNIT, block)
        if there:
            assert found in there, "a boundary that was vouched for was given to another block"
        else:
            assert found == block
            self.accepted.setdefault((group, block), set()).add(prefix)

    def publish_range(self, group: int, prefix: Prefix, start: int, table: list[int]) -> None:
        """Publish the units of `prefix` behind the first `start` at once: as unit by unit, whatever was there."""
        accepted = []
        for length in range(start + 1, len(prefix) + 1):
            block = table[(length - 1) // self.units_per_block]
            if block and not self.vouching(group, prefix[:length]):
                accepted.append((block, prefix[:length]))
        end = len(prefix) * UNIT
        others = dict(self.index.publish_range(group, self.root, self.hashes(prefix), start * UNIT, end, table))
        for block, accepted_prefix in accepted:
            self.accepted.setdefault((group, block), set()).add(accepted_prefix)
        for position, block in enumerate(table):
            length = (position + 1) * self.units_per_block
            if not start < length <= len(prefix) or not block:
                assert position not in others
                continue
            there = self.vouching(group, prefix[:length])
            assert others.get(position, block) in there
            assert others.get(position) != block

    @rule()
    def start_writer(self) -> None:
        if len(self.writers) < 4:
            self.writers.append(Writer((), {group.group_id: [] for group in self.groups}))

    @precondition(lambda self: self.accepted)
    @rule(draw=st.data())
    def resume_writer(self, draw: st.DataObject) -> None:
        """A hit: what it resumes from is published; it writes a copy of the tail and publishes what comes after."""
        prefix = draw.draw(st.sampled_from(sorted(self.prefixes())))
        num_blocks = -(-len(prefix) // self.units_per_block)
        self.writers.append(Writer(prefix, {group.group_id: [NULL_BLOCK] * num_blocks for group in self.groups}))

    @precondition(lambda self: self.writers)
    @rule(
        draw=st.data(),
        units=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        state_at=st.none() | st.integers(1, 5),
        at_once=st.booleans(),
        holes=st.sets(st.integers(0, MAX_UNITS), max_size=1),
    )
    def advance(
        self, draw: st.DataObject, units: list[int], state_at: int | None, at_once: bool, holes: set[int]
    ) -> None:
        writer = draw.draw(st.sampled_from(self.writers))
        start = len(writer.prefix)
        writer.prefix = (writer.prefix + tuple(units))[:MAX_UNITS]
        dead = self.dead_blocks()
        self.announced.clear()
        for group in self.groups:
            if not group.is_state:
                table = self.fill_table(writer, group.group_id, start)
                if at_once:
                    # What has left a window is not there any more.
                    table = [NULL_BLOCK if position in holes else block for position, block in enumerate(table)]
                    self.publish_range(group.group_id, writer.prefix, start, table)
                    continue
                for length in range(start + 1, len(writer.prefix) + 1):
                    self.publish(group.group_id, writer.prefix[:length], table[(length - 1) // self.units_per_block])
        state = self.group_of(GroupKind.STATE)
        if state is not None and state_at is not None and start + state_at <= len(writer.prefix):
            self.publish(state, writer.prefix[: start + state_at], self.new_block())
        self.assert_deaths_were_announced(dead)

    def new_block(self) -> int:
        self.num_blocks += 1
        return self.num_blocks

    def fill_table(self, writer: Writer, group: int, start: int) -> list[int]:
        """Take blocks for what was added to the prefix behind the first `start` units."""
        table = writer.tables[group]
        for position in range(start // self.units_per_block, -(-len(writer.prefix) // self.units_per_block)):
            if position == len(table):
                table.append(self.new_block())
            elif not table[position]:
                table[position] = self.new_block()
        return table

    @precondition(lambda self: self.accepted)
    @rule(draw=st.data())
    def unpublish(self, draw: st.DataObject) -> None:
        group, block = draw.draw(st.sampled_from(sorted(self.accepted)))
        before = {p for p in self.prefixes() if self.vouching(group, p)}
        dead = self.dead_blocks()
        self.announced.clear()
        lost = self.index.unpublish(group, block)
        del self.accepted[group, block]
        dead.pop((group, block))
        self.writers = [writer for writer in self.writers if block not in writer.tables[group][-1:]]
        after = {p for p in self.prefixes() if self.vouching(group, p)}
        assert sorted(lost) == sorted(self.hashes(p)[-1] for p in before - after)
        assert not self.index.is_published(group, block)
        self.assert_deaths_were_announced(dead)

    @rule()
    def unpublish_what_is_not_published(self) -> None:
        assert self.index.unpublish(0, MAX_BLOCKS - 1) == []

    # What must hold.

    def dead_blocks(self) -> dict[tuple[int, int], bool]:
        return {(group, block): self.index.is_dead(group, block) for group, block in self.accepted}

    def assert_deaths_were_announced(self, before: dict[tuple[int, int], bool]) -> None:
        died = {key for key, dead in self.dead_blocks().items() if dead and not before.get(key, True)}
        assert died <= self.announced, "a block died and nobody was told"

    @invariant()
    def every_prefix_is_found_exactly_while_a_block_vouches_for_it(self) -> None:
        everything = {prefix[:count] for writer in self.writers for prefix in [writer.prefix] for count in range(1, 10)}
        for prefix in (everything | self.prefixes()) - {()}:
            for group in self.groups:
                vouching = self.vouching(group.group_id, prefix)
                found = self.find(group.group_id, prefix)
                assert found in (vouching or {NULL_BLOCK}), f"{prefix} of {group.name}: {found}, not {vouching}"

    @invariant()
    def published_blocks_are_those_that_were_accepted(self) -> None:
        published = {(g.group_id, block) for g in self.groups for block in self.index.published(g.group_id)}
        assert published == set(self.accepted)
        assert len(self.index) == len(published)

    @invariant()
    def units_are_those_that_hold_or_lead_to_something(self) -> None:
        held = self.prefixes()
        needed = {prefix[:count] for prefix in held for count in range(1, len(prefix) + 1)}
        hashes = {self.hashes(prefix)[-1] for prefix in needed}
        runs = list(self.index.tree)
        assert {run.hash_at(depth) for run in runs for depth in range(run.start + 1, run.end + 1)} == hashes
        assert self.index.num_units == len(hashes)
        assert any(run.parent is None for run in runs) == bool(held)
        for prefix in needed | {writer.prefix for writer in self.writers}:
            known = max(count for count in range(len(prefix) + 1) if prefix[:count] in needed | {()})
            assert self.match(prefix).depth == known

    @invariant()
    def facts_follow_from_what_is_published(self) -> None:
        for prefix in self.prefixes():
            run = self.match(prefix).run_of(len(prefix))
            if self.group_of(GroupKind.ATTENTION) is not None:
                assert (len(prefix) <= run.start + run.reach) == self.is_reachable(prefix)
            if self.group_of(GroupKind.STATE) is not None:
                assert run.has_state == self.is_live(prefix)
        for group, block in self.accepted:
            prefixes = [p for p in self.prefixes() if self.find(group, p) == block]
            usable = any(self.is_reachable(p) and (self.groups[group].is_state or self.is_live(p)) for p in prefixes)
            assert self.index.is_dead(group, block) == (not usable)

    @invariant()
    def attention_reaches_as_far_as_it_is_published_without_a_hole(self) -> None:
        if self.group_of(GroupKind.ATTENTION) is None:
            return
        for writer in self.writers:
            for length in (0, len(writer.prefix) // 2, len(writer.prefix)):
                prefix = writer.prefix[:length]
                reachable = [count for count in range(length + 1) if self.is_reachable(prefix[:count])]
                assert self.index.attention_reach(self.match(prefix)) == reachable[-1] * UNIT

    @invariant()
    def the_last_state_is_the_longest_kept(self) -> None:
        state = self.group_of(GroupKind.STATE)
        if state is None:
            return
        for writer in self.writers:
            match = self.match(writer.prefix)
            kept = [count * UNIT for count in range(1, match.depth + 1) if self.find(state, writer.prefix[:count])]
            for limit in range(0, len(writer.prefix) * UNIT + 1, UNIT):
                for step in (UNIT, 3 * UNIT):
                    expected = max((p for p in kept if p <= limit and p % step == 0), default=0)
                    assert self.index.last_state(match, limit, step) == expected

    @invariant()
    def boundaries_are_those_that_are_found(self) -> None:
        for writer in self.writers:
            for group in self.groups:
                prefixes = (writer.prefix[:count] for count in range(1, len(writer.prefix) + 1))
                expected = [len(prefix) * UNIT for prefix in prefixes if self.find(group.group_id, prefix)]
                assert self.index.boundaries(self.match(writer.prefix), group.group_id) == expected

    @invariant()
    def a_table_names_the_vouching_block_of_each_place(self) -> None:
        for writer in self.writers:
            match = self.match(writer.prefix)
            ends = [*range(self.units_per_block, match.depth, self.units_per_block), match.depth]
            for group in self.groups:
                if not group.is_state and match.depth:
                    table = [self.find(group.group_id, writer.prefix[:end]) for end in ends]
                    for first in (0, len(table) // 2, len(table)):
                        found = self.index.table(match, group.group_id, first, match.depth * UNIT)
                        assert found == table[first:]

    @invariant()
    def what_a_block_vouches_for_is_in_order(self) -> None:
        for group, block in self.accepted:
            vouched = self.index.vouched(group, block)
            prefixes = sorted((len(p), p) for p in self.prefixes() if self.find(group, p) == block)
            assert vouched == [(count * UNIT, self.hashes(prefix)[-1]) for count, prefix in prefixes]

    @invariant()
    def continuations_are_known(self) -> None:
        attention = self.group_of(GroupKind.ATTENTION)
        held = self.prefixes()
        for prefix in held:
            longer = [p for p in held if len(p) > len(prefix) and p[: len(prefix)] == prefix]
            if attention is not None:
                longer = [p for p in longer if len(p) == len(prefix) + 1 and self.vouching(attention, p)]
            assert self.index.continues(self.match(prefix)) == bool(longer)


TestIndexMachine = IndexMachine.TestCase
# The model compares every block with every prefix: its cost grows faster than what it finds.
TestIndexMachine.settings = settings(stateful_step_count=40)
