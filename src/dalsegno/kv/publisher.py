"""What committed tokens make visible: attention blocks, boundary states, and the hand-offs that follow.

Called at commit and between steps only, so that nothing is published before its bytes are written.
"""

from collections import Counter
from collections.abc import Sequence

from dalsegno.config import CacheConfig
from dalsegno.hashing.block_hash import extend_block_hashes
from dalsegno.kv.hand_off import HandOffs
from dalsegno.kv.index import PrefixIndex
from dalsegno.kv.paged_group import PagedGroup
from dalsegno.kv.pins import BlockPins
from dalsegno.kv.pool import SlabPool
from dalsegno.kv.state_group import StateGroup
from dalsegno.kv.tables import RequestBlocks
from dalsegno.request import Request
from dalsegno.types import BlockHash

__all__ = ["Publisher", "hash_at"]


def hash_at(request: Request, boundary: int, hash_block_size: int) -> BlockHash:
    """The hash of the request's first `boundary` tokens, a multiple of H that its hashes cover."""
    return request.block_hashes[boundary // hash_block_size - 1]


class Publisher:
    """Publishes for requests, within their budget of states; counts what it did in `counters`."""

    def __init__(
        self,
        config: CacheConfig,
        pool: SlabPool,
        pins: BlockPins,
        index: PrefixIndex,
        paged: Sequence[PagedGroup],
        state: StateGroup | None,
        counters: Counter[str],
    ) -> None:
        """Publish blocks of `pool` in `index`."""
        self.hand_offs = HandOffs(pins, index)
        self._config = config
        self._unit = config.hash_block_size
        self._pool = pool
        self._index = index
        self._paged = paged
        self._state = state
        self._counters = counters

    def extend_hashes(self, request: Request) -> None:
        """Hash the full units the request knows by now."""
        extend_block_hashes(request.root_hash, request.block_hashes, request.token_ids, self._unit)

    def publish_step(self, request: Request, blocks: RequestBlocks, after: int) -> None:
        """Publish what a step completed, exports and freeze included: `after` tokens are computed by now."""
        self.extend_hashes(request)
        end = after - after % self._unit
        for group in self._paged:
            table = blocks.tables[group.spec.group_id]
            hashes, adopt = request.block_hashes, not blocks.packed
            group.publish(table, request.root_hash, hashes, blocks.published, end, adopt=adopt)
        blocks.published = end
        done = [boundary for boundary in blocks.planned if boundary <= after]
        del blocks.planned[: len(done)]
        if self._state is not None and blocks.state is not None:
            for boundary, block in blocks.state.exports:
                self._publish_state(request, blocks, boundary, block)
                self._pool.unpin(self._state.group_id, block)
            blocks.state.exports.clear()
            if after in done:
                self._publish_state(request, blocks, after, blocks.state.current)
        # A boundary that is used again is worth having in the store, whatever has become of it there.
        for boundary in (blocks.hit, *done):
            self._hand_off(request, blocks, boundary)
        blocks.hit = 0

    def publish_last_state(self, request: Request, blocks: RequestBlocks, *, finished: bool) -> None:
        """Publish the furthest restorable state of a request that is about to let go; hand it off if it finished."""
        boundary = blocks.published
        if self._state is not None and blocks.state is not None:
            last = self._state.last_restorable(blocks.state, request.num_computed_tokens, self._unit)
            if finished and last is not None and not self._is_worth_keeping(self._state, request, last[0]):
                last = blocks.state.kept
            if last is None or not self._publish_state(request, blocks, *last):
                return
            boundary = last[0]
        if finished:
            self._hand_off(request, blocks, boundary)

    def use_states(self, request: Request, blocks: RequestBlocks) -> None:
        """Make the states the request used or published as recent as the attention it has just let go."""
        if self._state is None:
            return
        for boundary in blocks.used_states:
            block = self._index.find_state(hash_at(request, boundary, self._unit))
            self._pool.pin(self._state.group_id, block)
            self._pool.unpin(self._state.group_id, block)

    def skip_checkpoint(self, request: Request) -> None:
        """Count a boundary state that was planned and is not kept."""
        self._counters["checkpoints_skipped"] += 1
        request.hit_report.checkpoints_skipped += 1

    def _is_worth_keeping(self, state: StateGroup, request: Request, boundary: int) -> bool:
        """Whether a finished request's last state is an answer state, or all that is left of an aborted prefill."""
        return boundary <= request.num_prompt_tokens or state.is_answer(boundary, request.num_prompt_tokens)

    def _publish_state(self, request: Request, blocks: RequestBlocks, boundary: int, block: int) -> bool:
        """Publish a state if the request may keep one more and none is there; whether it was published."""
        assert self._state is not None, "a state is published without a state group"
        is_new = not self._state.has(hash_at(request, boundary, self._unit))
        if is_new and request.num_states_kept >= self._config.max_states_per_request:
            self.skip_checkpoint(request)
            return False
        blocks.used_states.append(boundary)
        if is_new:
            self._state.publish(request.root_hash, request.block_hashes, boundary, block)
            request.num_states_kept += 1
            self._counters["boundary_states_published"] += 1
        return is_new

    def _hand_off(self, request: Request, blocks: RequestBlocks, boundary: int) -> None:
        if not boundary or not self.hand_offs.wanted(request, boundary):
            return
        listed = blocks.hand_offs[-1].boundary if blocks.hand_offs else 0
        hand_off = self.hand_offs.make(request, boundary, listed)
        if hand_off is not None:
            blocks.hand_offs.append(hand_off)
