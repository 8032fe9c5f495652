"""Block tables of one attention or window group: growing, publishing, adopting, leaving the window."""

from collections.abc import Sequence

from dalsegno.kv.index import PrefixIndex
from dalsegno.kv.layout import GroupSpec
from dalsegno.kv.pool import SlabPool
from dalsegno.prefix.resolve import window_first_block
from dalsegno.types import NULL_BLOCK, BlockHash

__all__ = ["PagedGroup"]


class PagedGroup:
    """The rules of one paged group over the tables of all requests; owns no state of its own."""

    def __init__(self, spec: GroupSpec, pool: SlabPool, index: PrefixIndex) -> None:
        """Serve `spec` from `pool`, publishing to `index`."""
        self.spec = spec
        self._pool = pool
        self._index = index

    def num_blocks(self, num_tokens: int) -> int:
        """Table entries that cover `num_tokens` tokens."""
        return -(-num_tokens // self.spec.block_size)

    def peak_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Most blocks a request of `num_tokens` tokens holds at once when no step computes more than `step_tokens`.

        A window group gives blocks back once they left the window; between two commits it holds those that cover the
        window and the step's tokens, which may straddle one block more.
        """
        blocks = self.num_blocks(num_tokens)
        if self.spec.window is None:
            return blocks
        return min(blocks, self.num_blocks(self.spec.window - 1 + step_tokens) + 1)

    def publish(
        self,
        table: list[int],
        root: BlockHash,
        hashes: Sequence[BlockHash],
        start: int,
        end: int,
        *,
        adopt: bool = True,
    ) -> None:
        """Let the table's blocks vouch for the boundaries in `(start, end]`, multiples of H; their bytes are written.

        A block that turns out full under a hash another block has already is dropped: the table adopts the published
        one, unless `adopt` is off. Modifies the table.
        """
        if self.spec.prefix == "none" or start == end:
            return
        group = self.spec.group_id
        others = self._index.publish_range(group, root, hashes, start, end, table)
        if adopt:
            for position, published in others:
                self._pool.pin(group, published)
                self._pool.unpin(group, table[position])
                table[position] = published

    def leave_window(self, table: list[int], released: int, num_tokens: int) -> int:
        """Give back the blocks no token after the first `num_tokens` can see; returns the first block still held.

        Blocks `[0, released)` were given back before. Modifies the table: what is gone becomes the null block.
        """
        if self.spec.window is None:
            return released
        first = window_first_block(num_tokens, self.spec.window, self.spec.block_size)
        end = min(first, len(table))
        if released < end:
            self._pool.unpin_all(self.spec.group_id, table[released:end])
            table[released:end] = [NULL_BLOCK] * (end - released)
        return max(released, first)
