"""The KV manager under random admissions, chunks, failures, preemptions, forks and hand-offs, over integer memory.

After every rule all counts are recomputed and every published block is compared with what a cold run writes, so a
published byte that changes, a state under a wrong boundary and a reference too few or too many are found at once.
"""

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dalsegno.config import CacheConfig
from dalsegno.kv.hand_off import HandOff, HandOffEntry
from dalsegno.kv.verify import census
from dalsegno.request import Request
from dalsegno.testing.builders import make_cut
from dalsegno.types import NULL_BLOCK, BlockHash
from tests.kv.driver import Driver, snapshot

UNIT = 4
MAX_TOKENS = 60


class Sink:
    """A connector that wants everything but what it was told is stored, by group and hash of a block's end."""

    def __init__(self) -> None:
        self.stored: set[tuple[int, BlockHash]] = set()

    def saves(self, request: Request, boundary: int) -> bool:
        return request.priority == 0

    def forget_prefix(self, request: Request) -> None:
        pass

    def first_needed(self, request: Request, group_id: int, boundary: int, listed: int) -> int:
        ends = range(listed - listed % UNIT, boundary + 1, UNIT)
        stored = (end for end in ends if end and (group_id, request.block_hashes[end // UNIT - 1]) not in self.stored)
        return min(boundary, max(0, next(stored, boundary) - UNIT))


class ManagerMachine(RuleBasedStateMachine):
    """Plays the scheduler badly: any order, any chunk, steps that raise, requests taken away at any time."""

    @initialize(
        kinds=st.sampled_from(["a", "w", "s", "as", "aw", "ws", "aws"]),
        blocks_per_slab=st.lists(st.integers(1, 4), min_size=3, max_size=3),
        units_per_block=st.sampled_from([1, 2, 4]),
        units_per_window_block=st.sampled_from([1, 2, 3]),
        num_slabs=st.integers(3, 14),
        window=st.sampled_from([2, 5, 7, 13, 100]),
        interval=st.sampled_from([0, 1, 2]),
        retention=st.sampled_from([0, 0, 2]),
        max_states=st.sampled_from([0, 1, 2, 4, 16]),
        connected=st.booleans(),
    )
    def start(
        self,
        kinds: str,
        blocks_per_slab: list[int],
        units_per_block: int,
        units_per_window_block: int,
        num_slabs: int,
        window: int,
        interval: int,
        retention: int,
        max_states: int,
        connected: bool,
    ) -> None:
        config = CacheConfig(
            block_size=UNIT * units_per_block,
            hash_block_size=UNIT,
            decode_checkpoint_interval=UNIT * interval,
            prefix_cache_retention_interval=UNIT * retention,
            max_states_per_request=max_states,
        )
        layout = make_cut(
            kinds,
            blocks_per_slab[: len(kinds)],
            num_slabs=num_slabs,
            block_size=config.block_size,
            block_sizes={"w": UNIT * units_per_window_block},
            hash_block_size=UNIT,
            window=window,
        )
        self.driver = Driver(layout, config)
        self.manager = self.driver.manager
        self.sink = Sink()
        if connected:
            self.manager.bind_connector(self.sink)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.taken: list[tuple[HandOffEntry, BlockHash]] = []
        self.seen: list[list[int]] = [[]]
        self.num_requests = 0

    # Coming.

    def arrive(self, draw: st.DataObject) -> None:
        """A new prompt goes on from somewhere in something seen before."""
        base = self.seen[draw.draw(st.integers(0, len(self.seen) - 1))]
        tail = [draw.draw(st.integers(0, 2))] * draw.draw(st.integers(1, 20))
        prompt = (base[: draw.draw(st.integers(0, len(base)))] + tail)[: MAX_TOKENS - 10]
        marks = draw.draw(st.lists(st.integers(1, MAX_TOKENS), max_size=2))
        priority = draw.draw(st.integers(0, 1))
        self.num_requests += 1
        request = self.driver.new(f"r{self.num_requests}", prompt, checkpoint_at=tuple(marks), priority=priority)
        self.waiting.append(request)
        self.seen.append(prompt)

    def look_up(self, request: Request) -> None:
        before = snapshot(self.manager)
        computed, boundary, report = self.manager.get_computed_blocks(request)
        assert boundary == computed.boundary == report.boundary <= request.num_tokens - 1
        assert boundary % UNIT == 0
        assert boundary == self.driver.hit(request.token_ids.tolist())
        for end in range(request.num_tokens + 1):
            view = self.manager.truncate_computed_blocks(computed, end)
            assert view.boundary == self.driver.hit(request.token_ids[: end + 1].tolist()) if end < boundary else True
            assert view.boundary <= end
        assert snapshot(self.manager) == before, "a lookup changed something"

    def try_to_admit(self, request: Request, chunk: int, end: int) -> int:
        """Admit a waiting request; returns its first chunk, or 0 when there is no room and nothing has changed."""
        self.look_up(request)
        before = snapshot(self.manager)
        computed, boundary, _ = self.manager.get_computed_blocks(request)
        computed = self.manager.truncate_computed_blocks(computed, min(end, boundary))
        num_tokens = min(chunk, request.num_tokens - computed.boundary)
        blocks = self.manager.allocate_slots(
            request, num_tokens, computed, room_for_tokens=min(request.num_tokens, MAX_TOKENS)
        )
        if blocks is None:
            assert snapshot(self.manager) == before, "a refused admission changed something"
            return 0
        return num_tokens

    def try_to_go_on(self, request: Request, chunk: int) -> int:
        before = snapshot(self.manager)
        num_tokens = min(chunk, request.num_tokens - request.num_computed_tokens)
        if self.manager.allocate_slots(request, num_tokens) is None:
            assert snapshot(self.manager) == before, "a refused allocation changed something"
            return 0
        return num_tokens

    # Steps.

    @rule(draw=st.data(), num_arrivals=st.integers(0, 2), num_steps=st.integers(1, 5), fails=st.integers(0, 7))
    def run(self, draw: st.DataObject, num_arrivals: int, num_steps: int, fails: int) -> None:
        for _ in range(min(num_arrivals, 4 - len(self.waiting))):
            self.arrive(draw)
        for number in range(num_steps):
            self.step(draw, fails=number == fails)
            self.driver.check()

    def step(self, draw: st.DataObject, *, fails: bool) -> None:
        parts: dict[Request, int] = {}
        chunks = st.integers(1, 24)
        for request in self.running:
            if request.num_tokens < MAX_TOKENS and draw.draw(st.integers(0, 3)):
                num_tokens = self.try_to_go_on(request, draw.draw(chunks))
                if num_tokens:
                    parts[request] = num_tokens
        for request in parts:
            self.manager.grant_write(request)
        for request in list(self.waiting):
            if draw.draw(st.booleans()):
                num_tokens = self.try_to_admit(request, draw.draw(chunks), draw.draw(st.integers(0, MAX_TOKENS)))
                if num_tokens:
                    parts[request] = num_tokens
                    self.waiting.remove(request)
                    self.running.append(request)
        if parts and not self.driver.step(parts, fails=fails):
            for request in parts:
                self.manager.free(request)
                self.running.remove(request)
                request.num_computed_tokens = 0
                self.waiting.append(request)
        for request in self.running:
            self.driver.assert_right_answer(request)

    # Going.

    @precondition(lambda self: self.running)
    @rule(draw=st.data())
    def preempt(self, draw: st.DataObject) -> None:
        request = draw.draw(st.sampled_from(self.running))
        self.driver.preempt(request)
        self.running.remove(request)
        self.waiting.append(request)

    @precondition(lambda self: self.running)
    @rule(draw=st.data(), takes=st.booleans())
    def finish(self, draw: st.DataObject, takes: bool) -> None:
        request = draw.draw(st.sampled_from(self.running))
        self.manager.publish_last_state(request, finished=True)
        if takes:
            self.take(self.manager.finalize_partial_tail_offloads(request), request)
            assert not self.manager.finalize_partial_tail_offloads(request)
        self.manager.free(request)
        self.running.remove(request)
        self.seen.append(request.token_ids[:MAX_TOKENS].tolist())

    @precondition(lambda self: self.waiting)
    @rule(draw=st.data())
    def give_up(self, draw: st.DataObject) -> None:
        self.waiting.remove(draw.draw(st.sampled_from(self.waiting)))

    @precondition(lambda self: any(r.num_computed_tokens == r.num_prompt_tokens for r in self.running))
    @rule(draw=st.data())
    def fork(self, draw: st.DataObject) -> None:
        """A second sample of a prompt that has just been prefilled."""
        parents = [r for r in self.running if r.num_computed_tokens == r.num_prompt_tokens == r.num_tokens - 1]
        if not parents:
            return
        parent = draw.draw(st.sampled_from(parents))
        self.num_requests += 1
        child = self.driver.new(f"r{self.num_requests}", parent.token_ids.tolist(), priority=parent.priority)
        before = snapshot(self.manager)
        if self.manager.fork(parent, child):
            self.running.append(child)
        else:
            assert snapshot(self.manager) == before, "a refused fork changed something"
            self.waiting.append(child)

    # Hand-offs.

    def take(self, hand_offs: Sequence[HandOff], request: Request) -> None:
        assert not hand_offs or self.manager.hand_offs.sink is not None
        assert all(self.sink.saves(request, hand_off.boundary) for hand_off in hand_offs)
        entries = [entry for hand_off in hand_offs for entry in hand_off.entries]
        for group, block, boundary in entries:
            assert block != NULL_BLOCK
            assert block == self.manager.index.find(group, request.root_hash, request.block_hashes, boundary)
            assert self.manager.pool.num_references(group, block) > 0
        self.taken += ((entry, request.block_hashes[entry[2] // UNIT - 1]) for entry in entries)

    @precondition(lambda self: any(blocks.hand_offs for blocks in self.manager.requests.values()))
    @rule()
    def take_hand_offs(self) -> None:
        by_id = {request.request_id: request for request in self.running}
        for request_id, hand_offs in self.manager.take_partial_tail_offloads().items():
            self.take(hand_offs, by_id[request_id])
        assert not self.manager.take_partial_tail_offloads(), "hand-offs were given out twice"

    @precondition(lambda self: self.taken)
    @rule(draw=st.data(), is_stored=st.booleans())
    def release_hand_off(self, draw: st.DataObject, is_stored: bool) -> None:
        (group, block, _), block_hash = self.taken.pop(draw.draw(st.integers(0, len(self.taken) - 1)))
        self.manager.pins.unpin([(group, block)])
        if is_stored:
            self.sink.stored.add((group, block_hash))

    # The whole.

    @rule(often=st.integers(0, 9))
    def reset(self, often: int) -> None:
        if often:
            return
        in_use = bool(self.running)
        before = snapshot(self.manager)
        assert self.manager.reset_prefix_cache() == (not in_use)
        if in_use:
            assert snapshot(self.manager) == before, "a refused reset changed something"
        else:
            assert len(self.manager.index) == 0
            held = self.manager.pins.num_slabs
            assert self.manager.pool.counts()["num_empty_slabs"] == self.manager.pool.num_slabs - 1 - held

    @invariant()
    def counts_and_published_bytes_are_right(self) -> None:
        self.driver.check()

    @invariant()
    def no_request_keeps_more_states_than_allowed(self) -> None:
        limit = self.driver.config.max_states_per_request
        assert all(0 <= request.num_states_kept <= limit for request in [*self.running, *self.waiting])

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        for request in self.running:
            self.driver.finish(request)
        self.manager.pins.unpin([entry[:2] for entry, _ in self.taken])
        self.driver.check()
        census(self.manager)


TestManagerMachine = ManagerMachine.TestCase
