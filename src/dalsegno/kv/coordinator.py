"""Blocks across groups: what a request's tokens need in each of them, and the tables that hold them.

Everything here is about references and room; what the blocks vouch for is the publisher's business.
"""

from collections.abc import Sequence

from dalsegno.kv.layout import MemoryLayout
from dalsegno.kv.paged_group import PagedGroup
from dalsegno.kv.pool import SlabPool
from dalsegno.kv.state_group import StateGroup
from dalsegno.kv.tables import ComputedBlocks, RequestBlocks, StateBlocks
from dalsegno.types import NULL_BLOCK, BlockCopy

__all__ = ["Coordinator"]


class Coordinator:
    """Gives requests their blocks in all groups at once, or in none. Owns no state of its own."""

    def __init__(
        self,
        layout: MemoryLayout,
        pool: SlabPool,
        paged: Sequence[PagedGroup],
        state: StateGroup | None,
        max_step_tokens: int,
    ) -> None:
        """Serve all groups of `layout` from `pool`; no step computes more than `max_step_tokens` for one request."""
        self.layout = layout
        self.pool = pool
        self.paged = paged
        self.state = state
        self._max_step_tokens = max_step_tokens

    def blocks_alone(self, num_tokens: int) -> list[int]:
        """Blocks per group that a request of `num_tokens` tokens can need when it runs alone.

        Its paged blocks, one copy target per paged group and two states.
        """
        needs = self._none()
        for group in self.paged:
            needs[group.spec.group_id] = group.peak_blocks(num_tokens, self._max_step_tokens) + 1
        if self.state is not None:
            needs[self.state.group_id] = 2
        return needs

    def slabs_alone(self, num_tokens: int) -> int:
        """Slabs, the null slab not counted, that a request of `num_tokens` tokens can need when it runs alone."""
        needs = self.blocks_alone(num_tokens)
        return sum(-(-need // group.blocks_per_slab) for need, group in zip(needs, self.layout.groups, strict=True))

    def admit(
        self, computed: ComputedBlocks, new_tokens: int, room_for_tokens: int, *, packed: bool
    ) -> RequestBlocks | None:
        """Pin a hit, test the room, then evict and hand out what the next `new_tokens` tokens need.

        Returns:
            The new request's blocks, or None: no room, and nothing has changed.
        """
        self.pool.packs = packed
        hit = [*enumerate(computed.tables)]
        if self.state is not None:
            hit.append((self.state.group_id, (computed.state_block,)))
        for group_id, table in hit:
            self.pool.pin_all(group_id, table)
        needs, room = self._admission_needs(computed, new_tokens, room_for_tokens)
        taken = self.pool.allocate(needs, _last_blocks(computed.tables)) if self.pool.fits(room) else None
        if taken is None:
            for group_id, table in hit:
                self.pool.unpin_all(group_id, table, used=False)
            return None
        blocks = self._new_blocks(computed.tables, computed.boundary, taken)
        blocks.packed = packed
        if self.state is not None:
            blocks.state = StateBlocks(current=computed.state_block, write=taken[self.state.group_id][0])
        return blocks

    def grow(self, blocks: RequestBlocks, num_tokens: int) -> bool:
        """Hand out what a running request needs to have `num_tokens` tokens computed; False changes nothing."""
        needs = self._none()
        for group in self.paged:
            needs[group.spec.group_id] = max(0, group.num_blocks(num_tokens) - len(blocks.tables[group.spec.group_id]))
        if self.state is not None and blocks.state is not None and self.state.needs_block(blocks.state):
            needs[self.state.group_id] = 1
        if not any(needs):
            return True
        taken = self.pool.allocate(needs, _last_blocks(blocks.tables))
        if taken is None:
            return False
        for group in self.paged:
            blocks.tables[group.spec.group_id] += taken[group.spec.group_id]
        if self.state is not None and blocks.state is not None and taken[self.state.group_id]:
            blocks.state.write = taken[self.state.group_id][0]
        return True

    def fork(self, source: RequestBlocks, num_computed: int) -> RequestBlocks | None:
        """Blocks of another request with the same computed tokens, or None: no room, and nothing has changed.

        Full blocks are shared, the last partial block is copied before the next step, the state is read by both and
        written by neither.
        """
        needs = self._none()
        for group in self.paged:
            needs[group.spec.group_id] = int(num_computed % group.spec.block_size != 0)
        taken = self.pool.allocate(needs, _last_blocks(source.tables))
        if taken is None:
            return None
        for group in self.paged:
            table = source.tables[group.spec.group_id]
            self.pool.pin_all(group.spec.group_id, table[: group.num_blocks(num_computed)])
        blocks = self._new_blocks(source.tables, num_computed, taken)
        blocks.published = source.published
        blocks.window_released = list(source.window_released)
        if self.state is not None and source.state is not None:
            self.pool.pin(self.state.group_id, source.state.current)
            blocks.state = StateBlocks(current=source.state.current)
        return blocks

    def grant_state(self, blocks: RequestBlocks) -> int | None:
        """One more state block for a wish, or None."""
        assert self.state is not None, "a state was wished for without a state group"
        assert blocks.state is not None, "a state was wished for by a request without state blocks"
        if blocks.packed:
            return None
        wish, near = self._none(), self._none()
        wish[self.state.group_id] = 1
        near[self.state.group_id] = blocks.state.current
        taken = self.pool.allocate(wish, near)
        return None if taken is None else taken[self.state.group_id][0]

    def release(self, blocks: RequestBlocks) -> None:
        """Drop all references of a request; tails become less recently used than prefixes, states most recently."""
        for copy in blocks.copies:
            self.pool.unpin(copy.group_id, copy.source)
        for group_id, table in enumerate(blocks.tables):
            self.pool.unpin_all(group_id, reversed(table))
        if self.state is not None and blocks.state is not None:
            self.pool.unpin_all(self.state.group_id, blocks.state.held())

    def _none(self) -> list[int]:
        return [0] * len(self.layout.groups)

    def _admission_needs(
        self, computed: ComputedBlocks, new_tokens: int, room_for_tokens: int
    ) -> tuple[list[int], list[int]]:
        """Blocks per group for the next tokens, and those that must find room in all, beside the hit's."""
        needs, room = self._none(), self._none()
        for group in self.paged:
            group_id, shared = group.spec.group_id, computed.boundary // group.spec.block_size
            needs[group_id] = group.num_blocks(computed.boundary + new_tokens) - shared
            later = group.num_blocks(room_for_tokens) - shared
            held = sum(block != NULL_BLOCK for block in computed.tables[group_id][:shared])
            peak = group.peak_blocks(room_for_tokens, self._max_step_tokens) - held
            room[group_id] = max(needs[group_id], min(later, peak))
        if self.state is not None:
            needs[self.state.group_id] = room[self.state.group_id] = 1
        return needs, room

    def _new_blocks(
        self, tables: Sequence[Sequence[int]], num_computed: int, taken: Sequence[Sequence[int]]
    ) -> RequestBlocks:
        """Tables that share the blocks of `num_computed` tokens and go on in `taken` blocks; all are pinned already."""
        blocks = RequestBlocks(tables=[[] for _ in tables], state=None, planned=[], published=num_computed)
        blocks.window_released = self._none()
        for group in self.paged:
            group_id, size = group.spec.group_id, group.spec.block_size
            full = num_computed // size
            partial = num_computed % size if len(tables[group_id]) > full else 0
            self._share(blocks, group_id, tables[group_id], full, partial, taken[group_id])
        return blocks

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
        blocks.tables[group_id] = [*table[:full], *own]
        if partial_tokens:
            blocks.copies.append(BlockCopy(group_id, table[full], own[0], partial_tokens))


def _last_blocks(tables: Sequence[Sequence[int]]) -> list[int]:
    return [table[-1] if table else NULL_BLOCK for table in tables]
