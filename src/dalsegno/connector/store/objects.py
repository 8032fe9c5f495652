"""How a prefix is cut into objects. Pure: lookup, jobs and both sides use it.

Full attention is stored in objects of `size` tokens, counted from the prompt's beginning, each under the hash at its
end; what is left below a hand-off's boundary is a partial object under the boundary's hash. A window group is stored
block by block, a state whole.
"""

from dalsegno.kv.layout import GroupSpec, MemoryLayout
from dalsegno.prefix.resolve import window_first_block
from dalsegno.types import GroupKind

__all__ = ["ObjectMap", "Span"]

Span = tuple[int, int]
"""(first token, boundary) of an object."""


class ObjectMap:
    """The cut of one engine."""

    def __init__(self, layout: MemoryLayout, attention_tokens: int) -> None:
        """Cut full attention into objects of `attention_tokens`, a multiple of its block size."""
        self.groups: tuple[GroupSpec, ...] = tuple(group for group in layout.groups if group.prefix != "none")
        self._size = {
            group.group_id: attention_tokens if group.kind is GroupKind.ATTENTION else group.block_size
            for group in self.groups
        }

    def size(self, group: GroupSpec) -> int:
        """Tokens per full object of a paged group."""
        return self._size[group.group_id]

    def needed(self, group: GroupSpec, boundary: int) -> list[Span]:
        """The objects that restore `boundary`, by rising end; the last one is partial if its end is no multiple."""
        if group.is_state:
            return [(0, boundary)]
        first = 0
        if group.window is not None:
            first = window_first_block(boundary, group.window, group.block_size) * group.block_size
        return self.cover(group, first, boundary)

    def cover(self, group: GroupSpec, first_token: int, boundary: int) -> list[Span]:
        """The objects that hold the tokens `[first_token, boundary)` of a paged group."""
        size = self._size[group.group_id]
        starts = range(first_token - first_token % size, boundary, size)
        return [(start, min(start + size, boundary)) for start in starts]

    def possible(self, group: GroupSpec, num_tokens: int, unit: int) -> list[Span]:
        """Every object that any request may have stored of the first `num_tokens` tokens of a chain."""
        return [(self.first_token(group, end), end) for end in range(unit, num_tokens + 1, unit)]

    def first_token(self, group: GroupSpec, boundary: int) -> int:
        """Where the object that ends at `boundary` begins."""
        size = self._size[group.group_id]
        return 0 if group.is_state else (boundary - 1) // size * size
