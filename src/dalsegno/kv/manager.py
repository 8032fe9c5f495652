"""The KV-cache manager: what the scheduler sees of memory and cache.

Order of one step: `get_computed_blocks` and `allocate_slots` give requests what they need, `grant_write` and
`grant_exports` what they want, `take_copies` ends the planning; after the worker has returned, `end_copies` once and
`commit` per request. Nothing is published before `commit`, so a step that is never committed publishes nothing.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from dalsegno.config import CacheConfig
from dalsegno.hashing.block_hash import root_hash
from dalsegno.hashing.recent import RecentHashes
from dalsegno.hit_report import HitReport, LostReason
from dalsegno.kv.coordinator import Coordinator
from dalsegno.kv.eviction import EvictionPolicy, LeastRecentlyUsed
from dalsegno.kv.hand_off import HandOff, HandOffSink
from dalsegno.kv.index import PrefixIndex
from dalsegno.kv.layout import MemoryLayout
from dalsegno.kv.loads import Loads
from dalsegno.kv.lookup import EvictedRing, explain_hit, find_hit, junction_of
from dalsegno.kv.paged_group import PagedGroup
from dalsegno.kv.pins import BlockPins
from dalsegno.kv.pool import SlabPool
from dalsegno.kv.publisher import Publisher, hash_at
from dalsegno.kv.state_group import StateGroup
from dalsegno.kv.tables import ComputedBlocks, RequestBlocks
from dalsegno.kv.verify import verify_manager
from dalsegno.prefix.checkpoints import checkpoint_boundaries
from dalsegno.request import Request
from dalsegno.types import NULL_BLOCK, BlockCopy, StateStep

__all__ = ["KVCacheManager"]


_COUNTERS = ("boundary_states_published", "boundary_states_thawed", "checkpoints_skipped")


class KVCacheManager:
    """Blocks of all requests and the prefix cache over them. Used on the engine thread only."""

    def __init__(
        self,
        layout: MemoryLayout,
        config: CacheConfig,
        *,
        max_step_tokens: int,
        policy: Callable[[PrefixIndex], EvictionPolicy] = LeastRecentlyUsed,
        slab_reserve: int | None = None,
    ) -> None:
        """Manage the slabs of `layout`.

        Args:
            layout: groups and slabs.
            config: block, unit and checkpoint settings.
            max_step_tokens: most tokens one step computes for one request.
            policy: makes the eviction policy over the index.
            slab_reserve: see `SlabPool`.
        """
        self.layout = layout
        self.config = config
        self.unit = config.hash_block_size
        self.index = PrefixIndex(layout, self.unit)
        self.pool = SlabPool(layout, self.index, policy(self.index), slab_reserve)
        self.pins = BlockPins(self.pool)
        self.loads = Loads(self.index, self.pool, self.pins)
        self.evicted = EvictedRing(len(layout.groups))
        self.pool.on_evict = lambda group, block, hashes: self.evicted.add(group, hashes)
        self.paged = [PagedGroup(group, self.pool, self.index) for group in layout.paged_groups]
        state = layout.state_group
        self.state = StateGroup(state.group_id, self.pool, self.index, config) if state is not None else None
        self.coordinator = Coordinator(layout, self.pool, self.paged, self.state, max_step_tokens)
        self.requests: dict[str, RequestBlocks] = {}
        self.copies_in_flight: list[tuple[str, BlockCopy]] = []
        self.counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self.publisher = Publisher(config, self.pool, self.pins, self.index, self.paged, self.state, self.counters)
        self.hand_offs = self.publisher.hand_offs
        self._recent = RecentHashes(self.unit)

    # Looking up.

    def start_request(self, request: Request) -> None:
        """Set the request's key domain and the hashes of its prompt; modifies the request only."""
        request.root_hash = root_hash(self.unit, request.cache_salt)
        if self.config.enable_prefix_caching:
            request.block_hashes = self._recent.hashes(request.root_hash, request.token_ids)

    def get_computed_blocks(self, request: Request) -> tuple[ComputedBlocks, int, HitReport]:
        """Find the longest boundary the request can resume at, at most its known tokens less one.

        A request that awaits log-probabilities of its prompt resumes nowhere. Changes nothing. The blocks carry no
        reference: they are valid until the next call that allocates or frees.
        """
        if not self.config.enable_prefix_caching or request.background:
            report = HitReport(lost={LostReason.CACHING_OFF.value: request.num_tokens})
            return self._find(request, 0), 0, report
        self.publisher.extend_hashes(request)
        computed = self._find(request, request.num_tokens - 1)
        report = explain_hit(self.index, self.evicted, computed, request.num_tokens)
        if request.awaits_prompt_logprobs:
            computed = self.truncate_computed_blocks(computed, 0)
            report.shorten(0, LostReason.PROMPT_LOGPROBS)
        return computed, computed.boundary, report

    def truncate_computed_blocks(self, computed: ComputedBlocks, end: int) -> ComputedBlocks:
        """View the same hit at the longest boundary of at most `end` that every group can restore; changes nothing."""
        return find_hit(self.index, computed.root, computed.hashes, end)

    # Room.

    def slabs_alone(self, num_tokens: int) -> int:
        """Slabs, the null slab not counted, that a request of `num_tokens` tokens can need when it runs alone."""
        return self.coordinator.slabs_alone(num_tokens)

    def allocate_slots(
        self,
        request: Request,
        new_tokens: int,
        computed: ComputedBlocks | None = None,
        *,
        room_for_tokens: int = 0,
        packed: bool = False,
    ) -> RequestBlocks | None:
        """Give the request what it needs to compute `new_tokens` more tokens.

        On admission `computed` is the hit to resume at: its blocks are pinned first, then the room is tested, then
        blocks are evicted and handed out.

        Args:
            request: running, or waiting with `computed`.
            new_tokens: tokens the next step computes.
            computed: a still valid hit, on admission only.
            room_for_tokens: on admission, tokens that must find room although they are not allocated yet.
            packed: on admission without a hit and with no other request admitted, see `RequestBlocks`.

        Returns:
            The request's blocks, or None: no room, and nothing has changed.
        """
        if computed is not None:
            return self._admit(request, new_tokens, computed, room_for_tokens, packed)
        blocks = self.requests[request.request_id]
        return blocks if self.coordinator.grow(blocks, request.num_computed_tokens + new_tokens) else None

    def grant_write(self, request: Request) -> None:
        """Decide where the next step writes the state, if `allocate_slots` left that open; never fails."""
        blocks = self.requests[request.request_id]
        if self.state is None or blocks.state is None or blocks.state.write is not None:
            return
        is_answer = self.state.is_answer(request.num_computed_tokens, request.num_prompt_tokens)
        refused, thawed = self.state.choose_write(
            blocks.state, is_answer=is_answer, grant=lambda: self.coordinator.grant_state(blocks)
        )
        if refused:
            self.publisher.skip_checkpoint(request)
        if thawed:
            self.counters["boundary_states_thawed"] += 1
            # The state of a shared prompt may have been published by another sample.
            request.num_states_kept = max(0, request.num_states_kept - 1)

    def grant_exports(self, request: Request, new_tokens: int) -> None:
        """Try for a block for every planned boundary strictly inside the next `new_tokens` tokens; never fails."""
        blocks = self.requests[request.request_id]
        if self.state is None or blocks.state is None:
            return
        start = request.num_computed_tokens
        for boundary in blocks.planned:
            if not start < boundary < start + new_tokens or self.state.has(hash_at(request, boundary, self.unit)):
                continue
            block = self.coordinator.grant_state(blocks)
            if block is None:
                self.publisher.skip_checkpoint(request)
            else:
                blocks.state.exports.append((boundary, block))

    def fork(self, parent: Request, child: Request) -> bool:
        """Let `child`, another sample of the same prompt, start from all that `parent` has computed.

        Full blocks are shared, the last partial block is copied before the next step, the state is read by all samples
        and written by none. False if there is no room: nothing has changed and the child can be admitted like any
        other request.
        """
        num_computed = parent.num_computed_tokens
        blocks = self.coordinator.fork(self.requests[parent.request_id], num_computed)
        if blocks is None:
            return False
        child.num_computed_tokens = num_computed
        child.block_hashes = list(parent.block_hashes)
        self.requests[child.request_id] = blocks
        return True

    # The step.

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Return and consume the copies the next step starts with; their sources stay pinned until `end_copies`."""
        for request_id, blocks in self.requests.items():
            self.copies_in_flight += ((request_id, copy) for copy in blocks.copies)
            blocks.copies.clear()
        return tuple(copy for _, copy in self.copies_in_flight)

    def end_copies(self) -> None:
        """The worker has returned from the step: give the sources of its copies back."""
        for _, copy in self.copies_in_flight:
            self.pool.unpin(copy.group_id, copy.source)
        self.copies_in_flight.clear()

    def block_tables(self, request: Request) -> tuple[Sequence[int], ...]:
        """The request's tables, per group; the manager's own lists."""
        return tuple(self.requests[request.request_id].tables)

    def state_step(self, request: Request) -> StateStep | None:
        """Where the next step reads and writes the request's state."""
        state = self.requests[request.request_id].state
        if state is None:
            return None
        assert state.write is not None, f"{request.request_id} is planned without a block to write its state to"
        return StateStep(state.current, state.write, state.step_exports(request.num_computed_tokens))

    def commit(self, request: Request, num_tokens: int) -> None:
        """The step computed `num_tokens` tokens of the request: advance, publish, make hand-offs, leave windows."""
        blocks = self.requests[request.request_id]
        before = request.num_computed_tokens
        after = request.num_computed_tokens = before + num_tokens
        if self.state is not None and blocks.state is not None:
            self.state.advance(blocks.state, before)
        if self.config.enable_prefix_caching and not request.background:
            self.publisher.publish_step(request, blocks, after)
        for group in self.paged:
            group_id = group.spec.group_id
            blocks.window_released[group_id] = group.leave_window(
                blocks.tables[group_id], blocks.window_released[group_id], after
            )

    def planned_boundaries(self, request: Request) -> Sequence[int]:
        """Boundaries the running request is still going to keep a state at."""
        return self.requests[request.request_id].planned

    # Letting go.

    def publish_last_state(self, request: Request, *, finished: bool) -> None:
        """Publish the furthest restorable state of a request that is about to let go; hand it off if it finished.

        Only committed bytes are published: call it between steps, never for a step that raised.
        """
        if self.config.enable_prefix_caching:
            self.publisher.publish_last_state(request, self.requests[request.request_id], finished=finished)

    def free(self, request: Request) -> None:
        """Take everything from the request; tails become less recently used than prefixes, states most recently."""
        blocks = self.requests.pop(request.request_id)
        self.hand_offs.release(blocks.hand_offs)
        self.coordinator.release(blocks)
        self.publisher.use_states(request, blocks)

    def bind_connector(self, sink: HandOffSink) -> None:
        """Make hand-offs for `sink` from now on."""
        self.hand_offs.sink = sink

    def take_partial_tail_offloads(self) -> Mapping[str, Sequence[HandOff]]:
        """Return and consume the hand-offs made since the last call for requests that go on; the pins pass along."""
        taken = {request_id: blocks.hand_offs for request_id, blocks in self.requests.items() if blocks.hand_offs}
        for request_id in taken:
            self.requests[request_id].hand_offs = []
        return taken

    def finalize_partial_tail_offloads(self, request: Request) -> Sequence[HandOff]:
        """Return and consume the hand-offs of a request that ends, before `free`; a second call returns nothing."""
        blocks = self.requests[request.request_id]
        taken, blocks.hand_offs = blocks.hand_offs, []
        return taken

    # The whole.

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing changed, while a request holds blocks.

        What is pinned keeps its bytes until the pin is given back; what is being loaded is not published any more.
        """
        if self.requests:
            return False
        for load in self.loads.active.values():
            self.loads.abandon(load)
        self._unpublish_all()
        return True

    def forget_chain(self, request: Request) -> list[tuple[str, int, int]]:
        """Unpublish every block that vouches for a boundary of the request's chain, also those that others hold.

        What a connector has stored of the chain goes too. Call it between steps. Who holds such a block keeps it;
        nobody finds it any more.

        Returns:
            (group, boundary, block) of each.
        """
        self.publisher.extend_hashes(request)
        forgotten = []
        for group in self.layout.groups:
            for boundary in range(self.unit, len(request.block_hashes) * self.unit + 1, self.unit):
                before = NULL_BLOCK
                # A duplicate inherits what the block unpublished first vouched for.
                while block := self.index.find(group.group_id, request.root_hash, request.block_hashes, boundary):
                    if block == before:
                        # Two chains name it, which only a fault of ours can bring about: no entry is to be trusted.
                        self._unpublish_all()
                        break
                    self.pool.unpublish(group.group_id, block)
                    forgotten.append((group.name, boundary, block))
                    before = block
        if self.hand_offs.sink is not None:
            self.hand_offs.sink.forget_prefix(request)
        return forgotten

    def usage(self) -> float:
        """Share of slabs in use, in [0, 1]."""
        return self.pool.usage()

    def verify(self) -> None:
        """Recompute every count from first principles; AssertionError with the difference if one is wrong."""
        verify_manager(self)

    # Inside.

    def _unpublish_all(self) -> None:
        for group in range(len(self.layout.groups)):
            for block in list(self.index.published(group)):
                self.pool.unpublish(group, block)
        self.index.clear()
        self.evicted.clear()

    def _find(self, request: Request, limit: int) -> ComputedBlocks:
        return find_hit(self.index, request.root_hash, request.block_hashes, limit)

    def _admit(
        self, request: Request, new_tokens: int, computed: ComputedBlocks, room_for_tokens: int, packed: bool
    ) -> RequestBlocks | None:
        assert request.request_id not in self.requests, f"{request.request_id} is admitted twice"
        boundary = computed.boundary
        assert not packed or not (self.requests or boundary), f"{request.request_id} is packed beside something else"
        room_for_tokens = max(room_for_tokens, boundary + new_tokens)
        blocks = self.coordinator.admit(computed, new_tokens, room_for_tokens, packed=packed)
        if blocks is None:
            return None
        request.num_computed_tokens = boundary
        request.prefill_target = request.num_tokens
        if self.config.enable_prefix_caching and not request.background:
            blocks.used_states = [boundary] if boundary else []
            blocks.hit = boundary
            elsewhere = request.shared_boundary if self.state is not None else 0
            planned = checkpoint_boundaries(
                request.num_prompt_tokens,
                request.num_tokens,
                boundary,
                max(junction_of(computed, self.index) or 0, elsewhere),
                request.checkpoint_at,
                self.config,
            )
            blocks.planned = sorted(planned)
        self.requests[request.request_id] = blocks
        return blocks
