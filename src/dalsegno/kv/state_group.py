"""The state blocks of one request, step by step: what is read, what is written, what is kept.

One rule covers producers, consumers and preempted requests: a state block that is published or shared is read, never
written. So before a step the current block is one of

    null, a hit, shared by samples   a block to write is *needed*
    published by this request        (frozen) another block is *wanted*; if there is none the freeze is taken back
    an answer state worth keeping    a second block is *wanted*; if there is none the answer state is given up
    private                          it is written in place
"""

from collections.abc import Callable, Sequence

from dalsegno.config import CacheConfig
from dalsegno.kv.index import PrefixIndex
from dalsegno.kv.pool import SlabPool
from dalsegno.kv.tables import StateBlocks
from dalsegno.types import NULL_BLOCK, BlockHash

__all__ = ["StateGroup"]


class StateGroup:
    """The rules of the state group over the state blocks of all requests; owns no state of its own."""

    def __init__(self, group_id: int, pool: SlabPool, index: PrefixIndex, config: CacheConfig) -> None:
        """Serve group `group_id` from `pool`, publishing to `index`."""
        self.group_id = group_id
        self._pool = pool
        self._index = index
        self._interval = config.decode_checkpoint_interval if config.enable_prefix_caching else 0

    def needs_block(self, state: StateBlocks) -> bool:
        """Whether the next step cannot run without a block to write."""
        return state.current == NULL_BLOCK or self._pool.num_references(self.group_id, state.current) > 1

    def is_answer(self, num_computed: int, num_prompt_tokens: int) -> bool:
        """Whether a state after `num_computed` tokens is an answer state worth keeping."""
        return bool(self._interval) and num_computed > num_prompt_tokens and num_computed % self._interval == 0

    def choose_write(
        self, state: StateBlocks, *, is_answer: bool, grant: Callable[[], int | None]
    ) -> tuple[bool, bool]:
        """Decide where a step writes when it needs no block; `grant()` tries for a wanted one.

        Returns:
            (a wanted block was refused, a freeze was taken back).
        """
        assert state.write is None, f"write block {state.write} was decided already"
        frozen = self._index.is_published(self.group_id, state.current)
        if not frozen and not is_answer:
            state.write = state.current
            return False, False
        if not frozen and state.kept is not None:
            state.write = state.kept[1]
        else:
            state.write = grant()
        if state.write is not None:
            state.keeps_current = not frozen
            return False, False
        if frozen:
            self._pool.unpublish(self.group_id, state.current)
        state.write = state.current
        return True, frozen

    def advance(self, state: StateBlocks, num_computed_before: int) -> None:
        """The step returned: what it wrote is the current state. Modifies references."""
        assert state.write is not None, "a step returned whose write block was never decided"
        old, state.current, state.write = state.current, state.write, None
        if state.keeps_current:
            assert state.kept is None or state.kept[1] == state.current, "two answer states are kept at once"
            state.kept = (num_computed_before, old)
            state.keeps_current = False
        elif old not in (state.current, NULL_BLOCK):
            self._pool.unpin(self.group_id, old)

    def publish(self, root: BlockHash, hashes: Sequence[BlockHash], boundary: int, block: int) -> bool:
        """Publish a state; False if one is there already, which stays."""
        return self._index.publish(self.group_id, root, hashes, boundary, block) == block

    def has(self, block_hash: BlockHash) -> bool:
        """Whether a state is kept under a hash."""
        return self._index.find_state(block_hash) != NULL_BLOCK

    def last_restorable(self, state: StateBlocks, num_computed: int, unit: int) -> tuple[int, int] | None:
        """The furthest unpublished (boundary, block) of a request that is about to let go, if any."""
        current = state.current
        if current and num_computed % unit == 0 and not self._index.is_published(self.group_id, current):
            return num_computed, current
        return state.kept
