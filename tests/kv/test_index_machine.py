"""The prefix index against a dictionary of what every block was published for."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dalsegno.hashing.block_hash import extend_block_hashes, root_hash, to_token_array
from dalsegno.kv.index import PrefixIndex
from dalsegno.testing.builders import make_cut
from dalsegno.types import NULL_BLOCK, BlockHash, GroupKind

UNIT = 4
MAX_UNITS = 9

Prefix = tuple[int, ...]
"""A prefix by its units; equal numbers are equal tokens."""


@dataclass
class Writer:
    """Somebody who computes a chain unit by unit into blocks of his own, as a request does."""

    prefix: Prefix
    blocks: dict[int, int] = field(default_factory=dict)
    """Paged group to the block that is being filled."""


class IndexMachine(RuleBasedStateMachine):
    """Writers publish, blocks are taken back; the model knows for which prefixes each block was ever accepted."""

    @initialize(kinds=st.sampled_from(["a", "s", "as", "w", "ws", "aws"]), units_per_block=st.sampled_from([1, 2, 4]))
    def start(self, kinds: str, units_per_block: int) -> None:
        layout = make_cut(kinds, [1] * len(kinds), block_size=UNIT * units_per_block, hash_block_size=UNIT, window=6)
        self.groups = layout.groups
        self.units_per_block = units_per_block
        self.index = PrefixIndex(self.groups, UNIT)
        self.index.on_rank_change = lambda group, block: self.announced.add((group, block))
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

    @rule()
    def start_writer(self) -> None:
        if len(self.writers) < 4:
            self.writers.append(Writer(()))

    @precondition(lambda self: self.accepted)
    @rule(draw=st.data())
    def resume_writer(self, draw: st.DataObject) -> None:
        """A hit: what it resumes from is published; it writes a copy of the tail and publishes what comes after."""
        prefix = draw.draw(st.sampled_from(sorted(self.prefixes())))
        self.writers.append(Writer(prefix))

    @precondition(lambda self: self.writers)
    @rule(draw=st.data(), units=st.lists(st.integers(0, 1), min_size=1, max_size=5), keeps=st.booleans())
    def advance(self, draw: st.DataObject, units: list[int], keeps: bool) -> None:
        writer = draw.draw(st.sampled_from(self.writers))
        start = len(writer.prefix)
        writer.prefix = (writer.prefix + tuple(units))[:MAX_UNITS]
        dead = self.dead_blocks()
        self.announced.clear()
        for group in self.groups:
            if group.is_state:
                continue
            for length in range(start + 1, len(writer.prefix) + 1):
                if (length - 1) % self.units_per_block == 0 or group.group_id not in writer.blocks:
                    self.num_blocks += 1
                    writer.blocks[group.group_id] = self.num_blocks
                self.publish(group.group_id, writer.prefix[:length], writer.blocks[group.group_id])
        state = self.group_of(GroupKind.STATE)
        if state is not None and keeps and len(writer.prefix) > start:
            self.num_blocks += 1
            self.publish(state, writer.prefix, self.num_blocks)
        self.assert_changes_were_announced(dead)

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
        self.writers = [writer for writer in self.writers if writer.blocks.get(group) != block]
        after = {p for p in self.prefixes() if self.vouching(group, p)}
        assert {node.hash for node in lost} == {self.hashes(p)[-1] for p in before - after}
        assert not self.index.is_published(group, block)
        self.assert_changes_were_announced(dead)

    @rule()
    def unpublish_what_is_not_published(self) -> None:
        assert self.index.unpublish(0, 10_000) == []

    # What must hold.

    def dead_blocks(self) -> dict[tuple[int, int], bool]:
        return {(group, block): self.index.is_dead(group, block) for group, block in self.accepted}

    def assert_changes_were_announced(self, before: dict[tuple[int, int], bool]) -> None:
        after = self.dead_blocks()
        changed = {key for key, dead in after.items() if before.get(key) != dead}
        assert changed <= self.announced, "a block became dead or alive and nobody was told"

    @invariant()
    def every_prefix_is_found_exactly_while_a_block_vouches_for_it(self) -> None:
        everything = {prefix[:count] for writer in self.writers for prefix in [writer.prefix] for count in range(1, 10)}
        for prefix in (everything | self.prefixes()) - {()}:
            for group in self.groups:
                vouching = self.vouching(group.group_id, prefix)
                found = self.index.find(group.group_id, self.hashes(prefix)[-1])
                assert found in (vouching or {NULL_BLOCK}), f"{prefix} of {group.name}: {found}, not {vouching}"

    @invariant()
    def published_blocks_are_those_that_were_accepted(self) -> None:
        published = {(g.group_id, block) for g in self.groups for block in self.index.published(g.group_id)}
        assert published == set(self.accepted)
        assert len(self.index) == len(published)

    @invariant()
    def nodes_are_those_that_hold_or_lead_to_something(self) -> None:
        held = self.prefixes()
        needed = {prefix[:count] for prefix in held for count in range(1, len(prefix) + 1)}
        hashes = {self.hashes(prefix)[-1] for prefix in needed}
        assert set(self.index.nodes) - {self.root} == hashes
        assert (self.root in self.index.nodes) == bool(held)

    @invariant()
    def flags_follow_from_what_is_published(self) -> None:
        for prefix in self.prefixes():
            node = self.index.nodes[self.hashes(prefix)[-1]]
            assert node.reachable == self.is_reachable(prefix), f"{prefix} claims reachable={node.reachable}"
        for group, block in self.accepted:
            nodes = [p for p in self.prefixes() if self.index.find(group, self.hashes(p)[-1]) == block]
            usable = any(self.is_reachable(p) and (self.groups[group].is_state or self.is_live(p)) for p in nodes)
            assert self.index.is_dead(group, block) == (not usable)

    @invariant()
    def attention_reaches_as_far_as_it_is_published_without_a_hole(self) -> None:
        attention = self.group_of(GroupKind.ATTENTION)
        for writer in self.writers:
            reachable = [count for count in range(len(writer.prefix) + 1) if self.is_reachable(writer.prefix[:count])]
            for limit in (0, len(writer.prefix) // 2 * UNIT, len(writer.prefix) * UNIT):
                expected = {attention: min(limit, reachable[-1] * UNIT)} if attention is not None else {}
                assert self.index.attention_reach(self.hashes(writer.prefix), limit) == expected

    @invariant()
    def what_a_block_vouches_for_is_in_order(self) -> None:
        for group, block in self.accepted:
            boundaries = [node.boundary for node in self.index.vouched(group, block)]
            assert boundaries == sorted(set(boundaries))

    @invariant()
    def continuations_are_known(self) -> None:
        attention = self.group_of(GroupKind.ATTENTION)
        held = self.prefixes()
        for prefix in held:
            longer = [p for p in held if len(p) > len(prefix) and p[: len(prefix)] == prefix]
            if attention is not None:
                longer = [p for p in longer if len(p) == len(prefix) + 1 and self.vouching(attention, p)]
            assert self.index.has_continuation(self.hashes(prefix)[-1]) == bool(longer)


TestIndexMachine = IndexMachine.TestCase
# The model compares every block with every prefix: its cost grows faster than what it finds.
TestIndexMachine.settings = settings(stateful_step_count=40)
