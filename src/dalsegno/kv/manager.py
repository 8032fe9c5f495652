"""The KV-cache manager: what the scheduler sees of memory and cache.

Order of one step: `get_computed_blocks` and `allocate_slots` give requests what they need, `grant_write` and
`grant_exports` what they want, `take_copies` ends the planning; after the worker has returned, `end_copies` once and
`commit` per request. Nothing is published before `commit`, so a step that is never committed publishes nothing.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from dalsegno.config import CacheConfig
from dalsegno.hashing.block_hash import extend_block_hashes, root_hash
from dalsegno.hashing.recent import RecentHashes
from dalsegno.hit_report import HitReport, LostReason
from dalsegno.kv.eviction import EvictionPolicy, LeastRecentlyUsed
from dalsegno.kv.hand_off import HandOffEntry, HandOffs, HandOffSink
from dalsegno.kv.index import PrefixIndex
from dalsegno.kv.layout import MemoryLayout
from dalsegno.kv.lookup import EvictedRing, explain_hit, find_hit, junction_of
from dalsegno.kv.paged_group import PagedGroup
from dalsegno.kv.pool import SlabPool
from dalsegno.kv.state_group import StateGroup
from dalsegno.kv.tables import ComputedBlocks, RequestBlocks, StateBlocks
from dalsegno.kv.verify import verify_manager
from dalsegno.prefix.checkpoints import checkpoint_boundaries
from dalsegno.request import Request
from dalsegno.types import NULL_BLOCK, BlockCopy, BlockHash, StateStep

__all__ = ["KVCacheManager"]


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
        self.index = PrefixIndex(layout.groups, self.unit)
        self.pool = SlabPool(layout, self.index, policy(self.index), slab_reserve)
        self.evicted = EvictedRing()
        self.pool.on_evict = lambda group, block, nodes: self.evicted.add(group, nodes)
        self.paged = [PagedGroup(group, self.pool, self.index) for group in layout.paged_groups]
        state = layout.state_group
        self.state = StateGroup(state.group_id, self.pool, self.index, config) if state is not None else None
        self.hand_offs = HandOffs(self.pool, self.index)
        self.requests: dict[str, RequestBlocks] = {}
        self.copies_in_flight: list[tuple[str, BlockCopy]] = []
        self.counters: Counter[str] = Counter()
        self._recent = RecentHashes(self.unit)
        self._max_step_tokens = max_step_tokens

    # Looking up.

    def start_request(self, request: Request) -> None:
        """Set the request's key domain and the hashes of its prompt; modifies the request only."""
        request.root_hash = root_hash(self.unit, request.cache_salt)
        if self.config.enable_prefix_caching:
            request.block_hashes = self._recent.hashes(request.root_hash, request.token_ids)

    def get_computed_blocks(self, request: Request) -> tuple[ComputedBlocks, int, HitReport]:
        """Find the longest boundary the request can resume at, at most its known tokens less one.

        Changes nothing. The blocks carry no reference: they are valid until the next call that allocates or frees.
        """
        if not self.config.enable_prefix_caching:
            report = HitReport(lost={LostReason.CACHING_OFF.value: request.num_tokens})
            return self._find(request, 0), 0, report
        self._extend_hashes(request)
        computed = self._find(request, request.num_tokens - 1)
        return computed, computed.boundary, explain_hit(self.index, self.evicted, computed, request.num_tokens)

    def truncate_computed_blocks(self, computed: ComputedBlocks, end: int) -> ComputedBlocks:
        """View the same hit at the longest boundary of at most `end` that every group can restore; changes nothing."""
        return find_hit(self.index, computed.root, computed.hashes, end)

    # Room.

    def blocks_alone(self, num_tokens: int) -> list[int]:
        """Blocks per group that a request of `num_tokens` tokens can need when it runs alone.

        Its paged blocks, one copy target per paged group and two states.
        """
        needs = [0] * len(self.layout.groups)
        for group in self.paged:
            needs[group.spec.group_id] = group.peak_blocks(num_tokens, self._max_step_tokens) + 1
        if self.state is not None:
            needs[self.state.group_id] = 2
        return needs

    def slabs_alone(self, num_tokens: int) -> int:
        """Slabs, the null slab not counted, that a request of `num_tokens` tokens can need when it runs alone."""
        needs = self.blocks_alone(num_tokens)
        return sum(-(-need // group.blocks_per_slab) for need, group in zip(needs, self.layout.groups, strict=True))

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
            room_for_tokens = max(room_for_tokens, computed.boundary + new_tokens)
            return self._admit(request, new_tokens, computed, room_for_tokens, packed)
        blocks = self.requests[request.request_id]
        needs = [0] * len(self.layout.groups)
        for group in self.paged:
            table = blocks.tables[group.spec.group_id]
            needs[group.spec.group_id] = max(0, group.num_blocks(request.num_computed_tokens + new_tokens) - len(table))
        if self.state is not None and blocks.state is not None and self.state.needs_block(blocks.state):
            needs[self.state.group_id] = 1
        return self._hand_out(blocks, needs)

    def grant_write(self, request: Request) -> None:
        """Decide where the next step writes the state, if `allocate_slots` left that open; never fails."""
        blocks = self.requests[request.request_id]
        if self.state is None or blocks.state is None or blocks.state.write is not None:
            return
        is_answer = self.state.is_answer(request.num_computed_tokens, request.num_prompt_tokens)
        refused, thawed = self.state.choose_write(
            blocks.state, is_answer=is_answer, grant=lambda: self._grant_state(blocks)
        )
        if refused:
            self._skip_checkpoint(request)
        if thawed:
            self.counters["boundary_states_thawed"] += 1
            request.num_states_kept -= 1

    def grant_exports(self, request: Request, new_tokens: int) -> None:
        """Try for a block for every planned boundary strictly inside the next `new_tokens` tokens; never fails."""
        blocks = self.requests[request.request_id]
        if self.state is None or blocks.state is None:
            return
        start = request.num_computed_tokens
        for boundary in blocks.planned:
            if not start < boundary < start + new_tokens or self.state.has(self._hash(request, boundary)):
                continue
            block = self._grant_state(blocks)
            if block is None:
                self._skip_checkpoint(request)
            else:
                blocks.state.exports.append((boundary, block))

    def fork(self, parent: Request, child: Request) -> bool:
        """Let `child`, another sample of the same prompt, start from all that `parent` has computed.

        Full blocks are shared, the last partial block is copied before the next step, the state is read by all samples
        and written by none. False if there is no room: nothing has changed and the child can be admitted like any
        other request.
        """
        source = self.requests[parent.request_id]
        num_computed = parent.num_computed_tokens
        needs = [0] * len(self.layout.groups)
        for group in self.paged:
            needs[group.spec.group_id] = int(num_computed % group.spec.block_size != 0)
        near = [table[-1] if table else NULL_BLOCK for table in source.tables]
        taken = self.pool.allocate(needs, near)
        if taken is None:
            return False
        blocks = RequestBlocks(tables=[[] for _ in needs], state=None, planned=[], published=source.published)
        blocks.window_released = list(source.window_released)
        for group in self.paged:
            group_id, size = group.spec.group_id, group.spec.block_size
            full = num_computed // size
            self._share(blocks, group_id, source.tables[group_id], full, num_computed % size, taken[group_id])
        if self.state is not None and source.state is not None:
            self.pool.pin(self.state.group_id, source.state.current)
            blocks.state = StateBlocks(current=source.state.current)
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
        if self.config.enable_prefix_caching:
            self._publish(request, blocks, after)
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
        blocks = self.requests[request.request_id]
        if not self.config.enable_prefix_caching:
            return
        boundary = blocks.published
        if self.state is not None and blocks.state is not None:
            last = self.state.last_restorable(blocks.state, request.num_computed_tokens, self.unit)
            if last is None or (finished and not self._is_worth_keeping(request, last[0])):
                return
            if not self._publish_state(request, *last):
                return
            boundary = last[0]
        if finished and boundary:
            self._hand_off(request, blocks, boundary)

    def free(self, request: Request) -> None:
        """Take everything from the request; tails become less recently used than prefixes, states most recently."""
        blocks = self.requests.pop(request.request_id)
        for copy in blocks.copies:
            self.pool.unpin(copy.group_id, copy.source)
        self.hand_offs.release(blocks.hand_offs)
        for group_id, table in enumerate(blocks.tables):
            for block in reversed(table):
                self.pool.unpin(group_id, block)
        if self.state is not None and blocks.state is not None:
            for boundary in blocks.used_states:
                state = self.index.find(self.state.group_id, self._hash(request, boundary))
                self.pool.pin(self.state.group_id, state)
                self.pool.unpin(self.state.group_id, state)
            for block in blocks.state.held():
                self.pool.unpin(self.state.group_id, block)

    def bind_connector(self, sink: HandOffSink) -> None:
        """Make hand-offs for `sink` from now on."""
        self.hand_offs.sink = sink

    def take_partial_tail_offloads(self) -> Mapping[str, Sequence[HandOffEntry]]:
        """Return and consume the hand-offs made since the last call for requests that go on; the pins pass along."""
        taken = {request_id: blocks.hand_offs for request_id, blocks in self.requests.items() if blocks.hand_offs}
        for request_id in taken:
            self.requests[request_id].hand_offs = []
        return taken

    def finalize_partial_tail_offloads(self, request: Request) -> Sequence[HandOffEntry]:
        """Return and consume the hand-offs of a request that ends, before `free`; a second call returns nothing."""
        blocks = self.requests[request.request_id]
        taken, blocks.hand_offs = blocks.hand_offs, []
        return taken

    def release_hand_off(self, entries: Sequence[HandOffEntry]) -> None:
        """Give back the pins of entries that were taken."""
        self.hand_offs.release(entries)

    # The whole.

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing changed, while anything is in use."""
        if self.requests or self.hand_offs.pins:
            return False
        for group in range(len(self.layout.groups)):
            for block in list(self.index.published(group)):
                self.pool.unpublish(group, block)
        self.evicted.clear()
        return True

    def usage(self) -> float:
        """Share of slabs in use, in [0, 1]."""
        return self.pool.usage()

    def verify(self) -> None:
        """Recompute every count from first principles; AssertionError with the difference if one is wrong."""
        verify_manager(self)

    # Inside.

    def _find(self, request: Request, limit: int) -> ComputedBlocks:
        return find_hit(self.index, request.root_hash, request.block_hashes, limit)

    def _hash(self, request: Request, boundary: int) -> BlockHash:
        return request.block_hashes[boundary // self.unit - 1]

    def _extend_hashes(self, request: Request) -> None:
        extend_block_hashes(request.root_hash, request.block_hashes, request.token_ids, self.unit)

    def _admit(
        self, request: Request, new_tokens: int, computed: ComputedBlocks, room_for_tokens: int, packed: bool
    ) -> RequestBlocks | None:
        assert request.request_id not in self.requests, f"{request.request_id} is admitted twice"
        boundary = computed.boundary
        assert not packed or not (self.requests or boundary), f"{request.request_id} is packed beside something else"
        self.pool.packs = packed
        self._pin_hit(computed)
        needs = [0] * len(self.layout.groups)
        room = list(needs)
        for group in self.paged:
            group_id, shared = group.spec.group_id, boundary // group.spec.block_size
            needs[group_id] = group.num_blocks(boundary + new_tokens) - shared
            room[group_id] = max(
                needs[group_id],
                min(
                    group.num_blocks(room_for_tokens) - shared,
                    group.peak_blocks(room_for_tokens, self._max_step_tokens),
                ),
            )
        if self.state is not None:
            needs[self.state.group_id] = room[self.state.group_id] = 1
        taken = None
        if self.pool.fits(room):
            near = [table[-1] if table else NULL_BLOCK for table in computed.tables]
            taken = self.pool.allocate(needs, near)
        if taken is None:
            self._unpin_hit(computed)
            return None
        blocks = RequestBlocks(tables=[[] for _ in needs], state=None, planned=[], published=boundary)
        blocks.used_states = [boundary] if boundary else []
        blocks.packed = packed
        blocks.window_released = [0] * len(needs)
        for group in self.paged:
            group_id, size = group.spec.group_id, group.spec.block_size
            table, full = computed.tables[group_id], boundary // size
            # `_share` takes references of its own; the hit's are given back below.
            self._share(blocks, group_id, table, full, boundary % size if len(table) > full else 0, taken[group_id])
        if self.state is not None:
            blocks.state = StateBlocks(current=computed.state_block, write=taken[self.state.group_id][0])
            self.pool.pin(self.state.group_id, computed.state_block)
        self._unpin_hit(computed)
        request.num_computed_tokens = boundary
        request.prefill_target = request.num_tokens
        if self.config.enable_prefix_caching:
            junction = junction_of(computed, self.index)
            planned = checkpoint_boundaries(
                request.num_prompt_tokens, request.num_tokens, boundary, junction, request.checkpoint_at, self.config
            )
            blocks.planned = sorted(planned)
        self.requests[request.request_id] = blocks
        return blocks

    def _pin_hit(self, computed: ComputedBlocks) -> None:
        for group_id, block in computed.blocks():
            self.pool.pin(group_id, block)

    def _unpin_hit(self, computed: ComputedBlocks) -> None:
        for group_id, block in computed.blocks():
            self.pool.unpin(group_id, block, used=False)

    def _share(
        self,
        blocks: RequestBlocks,
        group_id: int,
        table: Sequence[int],
        full: int,
        partial_tokens: int,
        own: Sequence[int],
    ) -> None:
        """Fill a new table: `full` shared blocks, then own ones, the first of them a copy of a partial block if any."""
        for block in table[:full]:
            self.pool.pin(group_id, block)
        blocks.tables[group_id] = [*table[:full], *own]
        if partial_tokens:
            self.pool.pin(group_id, table[full])
            blocks.copies.append(BlockCopy(group_id, table[full], own[0], partial_tokens))

    def _hand_out(self, blocks: RequestBlocks, needs: Sequence[int]) -> RequestBlocks | None:
        near = [table[-1] if table else NULL_BLOCK for table in blocks.tables]
        taken = self.pool.allocate(needs, near)
        if taken is None:
            return None
        for group in self.paged:
            blocks.tables[group.spec.group_id] += taken[group.spec.group_id]
        if self.state is not None and blocks.state is not None and taken[self.state.group_id]:
            blocks.state.write = taken[self.state.group_id][0]
        return blocks

    def _grant_state(self, blocks: RequestBlocks) -> int | None:
        """One more state block for a wish, or None."""
        assert self.state is not None, "a state was wished for without a state group"
        assert blocks.state is not None, "a state was wished for by a request without state blocks"
        if blocks.packed:
            return None
        wish = [0] * len(self.layout.groups)
        wish[self.state.group_id] = 1
        near = [NULL_BLOCK] * len(wish)
        near[self.state.group_id] = blocks.state.current
        taken = self.pool.allocate(wish, near)
        return None if taken is None else taken[self.state.group_id][0]

    def _is_worth_keeping(self, request: Request, boundary: int) -> bool:
        """Whether a finished request's last state is an answer state, or all that is left of an aborted prefill."""
        assert self.state is not None, "a state is judged without a state group"
        return boundary <= request.num_prompt_tokens or self.state.is_answer(boundary, request.num_prompt_tokens)

    def _skip_checkpoint(self, request: Request) -> None:
        self.counters["checkpoints_skipped"] += 1
        request.hit_report.checkpoints_skipped += 1

    def _publish(self, request: Request, blocks: RequestBlocks, after: int) -> None:
        """Publish what the step completed, exports and freeze included, and make the hand-offs that follow."""
        self._extend_hashes(request)
        end = after - after % self.unit
        for group in self.paged:
            table = blocks.tables[group.spec.group_id]
            hashes, adopt = request.block_hashes, not blocks.packed
            group.publish(table, request.root_hash, hashes, blocks.published, end, adopt=adopt)
        blocks.published = end
        done = [boundary for boundary in blocks.planned if boundary <= after]
        del blocks.planned[: len(done)]
        if self.state is None or blocks.state is None:
            kept = done
        else:
            kept = [
                boundary for boundary, block in blocks.state.exports if self._publish_state(request, boundary, block)
            ]
            for _, block in blocks.state.exports:
                self.pool.unpin(self.state.group_id, block)
            blocks.state.exports.clear()
            if after in done and self._publish_state(request, after, blocks.state.current):
                kept.append(after)
        for boundary in kept:
            self._hand_off(request, blocks, boundary)

    def _publish_state(self, request: Request, boundary: int, block: int) -> bool:
        """Publish a state if the request may keep one more and none is there; whether it was published."""
        assert self.state is not None, "a state is published without a state group"
        if request.num_states_kept >= self.config.max_states_per_request:
            return False
        if not self.state.publish(request.root_hash, request.block_hashes, boundary, block):
            return False
        request.num_states_kept += 1
        self.requests[request.request_id].used_states.append(boundary)
        self.counters["boundary_states_published"] += 1
        return True

    def _hand_off(self, request: Request, blocks: RequestBlocks, boundary: int) -> None:
        if not self.hand_offs.wanted(request):
            return
        entries = self.hand_offs.make(request.block_hashes, boundary, blocks.handed_off)
        if entries:
            blocks.hand_offs += entries
            blocks.handed_off = boundary
