"""The longest joint boundary: one pure function for device pool, store and simulator.

What "vouches for" means, per kind of group:

* attention: every block below the boundary is there, the last one at least up to the boundary (append-only, so any
  boundary inside its computed tokens will do);
* window W: the blocks that cover the W-1 tokens before the boundary are there;
* state: a copy was kept at exactly this boundary. A longer kept state never implies a shorter one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from dalsegno.types import GroupKind

__all__ = ["Contains", "LookupGroup", "Resolution", "covered_up_to", "resolve", "window_first_block"]


class LookupGroup(Protocol):
    """What hit resolution needs to know of a group."""

    @property
    def kind(self) -> GroupKind:
        """Attention, window or state."""
        ...

    @property
    def name(self) -> str:
        """Name in reports."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens per block; moves no hit of a state group."""
        ...

    @property
    def window(self) -> int | None:
        """Tokens a window layer sees."""
        ...

    @property
    def prefix(self) -> str:
        """One of "fine", "block" (hits at multiples of the block size only), "none" (no part in lookup)."""
        ...


class Contains(Protocol):
    """Whether a tier holds what a group needs of one block at one boundary."""

    def __call__(self, group: int, block_index: int, boundary: int) -> bool:
        """Answer for the block `block_index` of `group`, good up to `boundary` (a multiple of H inside that block).

        For a state group the block index is meaningless (0) and the state at exactly `boundary` is meant.
        """
        ...


@dataclass(frozen=True, slots=True)
class Resolution:
    """The joint boundary, and the longest boundary each group could restore on its own, by group name."""

    boundary: int
    by_group: dict[str, int]


def resolve(
    groups: Sequence[LookupGroup],
    hash_block_size: int,
    limit: int,
    contains: Contains,
    known: Mapping[int, Callable[[int, int], int]] = MappingProxyType({}),
) -> Resolution:
    """Find the largest multiple of H that is at most `limit` and that every group can restore.

    A fixed point over the groups: each may only lower the candidate, so the loop ends, and the result is the largest
    common boundary because no group ever lowers it below one that it can restore.

    Args:
        groups: all groups; `contains` is asked by index. Those with prefix "none" take no part.
        hash_block_size: H, in tokens.
        limit: largest boundary allowed; at most the known tokens less one.
        contains: the tier's answer, see `Contains`.
        known: by index, `known(limit, step)` is the group's own longest boundary, a multiple of `step` and at most
            `limit`, where the tier knows it without walking; `contains` is not asked then.
    """

    def longest(index: int, group: LookupGroup, limit: int) -> int:
        if index in known:
            return known[index](limit, step)
        return _longest(index, group, step, limit, contains)

    step = hash_block_size
    for group in groups:
        if group.prefix == "block":
            step = math.lcm(step, group.block_size)
    limit = max(0, limit - limit % step)
    taking_part = [(i, group) for i, group in enumerate(groups) if group.prefix != "none"]
    own = {group.name: longest(i, group, limit) for i, group in taking_part}
    boundary = min(own.values(), default=0)
    while boundary:
        lowered = boundary
        for i, group in taking_part:
            lowered = longest(i, group, lowered)
        if lowered == boundary:
            break
        boundary = lowered
    return Resolution(boundary, own)


def covered_up_to(reach: int) -> Callable[[int, int], int]:
    """What `resolve` takes as known of an attention group that covers every boundary up to `reach`."""
    return lambda limit, step: min(limit, reach) // step * step


def window_first_block(boundary: int, window: int, block_size: int) -> int:
    """Index of the first block that holds one of the `window - 1` tokens before `boundary`."""
    return max(0, boundary - window + 1) // block_size


def _longest(index: int, group: LookupGroup, step: int, limit: int, contains: Contains) -> int:
    """The group's own longest boundary, a multiple of `step` and at most `limit` (itself such a multiple)."""
    if group.kind is GroupKind.ATTENTION:
        return _longest_attention(index, group.block_size, step, limit, contains)
    if group.kind is GroupKind.WINDOW:
        assert group.window is not None, f"window group {group.name} without a window"
        return _longest_window(index, group.block_size, group.window, step, limit, contains)
    return next((b for b in range(limit, 0, -step) if contains(index, 0, b)), 0)


def _longest_attention(index: int, block_size: int, step: int, limit: int, contains: Contains) -> int:
    block = 0
    while (block + 1) * block_size <= limit and contains(index, block, (block + 1) * block_size):
        block += 1
    start = block * block_size
    end = min(limit, start + block_size)
    end -= end % step
    return next((b for b in range(end, start, -step) if contains(index, block, b)), start - start % step)


def _longest_window(index: int, block_size: int, window: int, step: int, limit: int, contains: Contains) -> int:
    boundary = limit
    while boundary:
        last = (boundary - 1) // block_size
        missing = next(
            (
                block
                for block in range(last, window_first_block(boundary, window, block_size) - 1, -1)
                if not contains(index, block, min((block + 1) * block_size, boundary))
            ),
            None,
        )
        if missing is None:
            return boundary
        # Every boundary down to the missing block's end needs that block whole, so none of them can be restored.
        boundary = boundary - step if missing == last else (missing + 1) * block_size - 1
        boundary -= boundary % step
    return 0
