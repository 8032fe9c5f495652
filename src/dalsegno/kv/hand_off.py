"""Hand-offs: a boundary with the exact blocks of every group it needs, each pinned, on its way to a connector.

A hand-off's blocks are those the index vouches for under the boundary's hashes, so their bytes cannot change. None is
made, and nothing is pinned, when nothing will save it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from dalsegno.kv.index import PrefixIndex
from dalsegno.kv.layout import GroupSpec
from dalsegno.kv.pins import BlockPins
from dalsegno.prefix.resolve import window_first_block
from dalsegno.request import Request
from dalsegno.types import NULL_BLOCK

__all__ = ["HandOff", "HandOffEntry", "HandOffSink", "HandOffs", "block_ends"]

HandOffEntry = tuple[int, int, int]
"""(group, block, boundary): the block vouches for everything in it up to the boundary."""


@dataclass(frozen=True, slots=True)
class HandOff:
    """A boundary and what restores it, as far as it is not stored yet; each entry carries one pin.

    Attributes:
        boundary: tokens restored.
        entries: paged groups first, block by block, and the state last.
    """

    boundary: int
    entries: tuple[HandOffEntry, ...]

    def blocks(self) -> list[tuple[int, int]]:
        """The pins: (group, block) of each entry."""
        return [(group, block) for group, block, _ in self.entries]


class HandOffSink(Protocol):
    """What the KV manager asks of a bound connector, on the engine thread. All but `forget_prefix` change nothing."""

    def saves(self, request: Request, boundary: int) -> bool:
        """Whether `boundary` of this request will be stored."""
        ...

    def first_needed(self, request: Request, group_id: int, boundary: int, listed: int) -> int:
        """The token from which on a group's blocks below `boundary` must be listed; `boundary` for none.

        Args:
            request: whose hashes name the tokens.
            group_id: the group; for a state group the answer is 0 (needed) or `boundary` (known stored).
            boundary: of the hand-off that is made.
            listed: tokens an earlier hand-off of the same commit covers.
        """
        ...

    def forget_prefix(self, request: Request) -> None:
        """Bytes of the request's chain were found to be wrong: what is stored of any of its boundaries must go."""
        ...


class HandOffs:
    """Makes hand-offs for the sink, if there is one."""

    def __init__(self, pins: BlockPins, index: PrefixIndex) -> None:
        """Pin what `index` vouches for; makes nothing until a sink is bound."""
        self._pins = pins
        self._index = index
        self.sink: HandOffSink | None = None

    def wanted(self, request: Request, boundary: int) -> bool:
        """Whether a hand-off at this boundary would be saved by anybody."""
        return self.sink is not None and self.sink.saves(request, boundary)

    def make(self, request: Request, boundary: int, listed: int) -> HandOff | None:
        """Collect and pin what restores `boundary`.

        Args:
            request: whose blocks they are.
            boundary: a multiple of H that the request has computed.
            listed: tokens an earlier hand-off of the same commit covers.

        Returns:
            The hand-off, or None when some group does not vouch for what it needs.
        """
        assert self.sink is not None, "a hand-off without a connector"
        entries: list[HandOffEntry] = []
        match = self._index.match(request.root_hash, request.block_hashes, boundary)
        for group in sorted(self._index.groups, key=lambda group: group.is_state):
            if group.prefix == "none":
                continue
            first = self.sink.first_needed(request, group.group_id, boundary, listed)
            ends = block_ends(group, first, boundary)
            if group.is_state:
                blocks = [self._index.vouching(match, group.group_id, end) for end in ends]
            else:
                first_block = (boundary - 1) // group.block_size + 1 - len(ends)
                blocks = self._index.table(match, group.group_id, first_block, boundary)
            # The last block may vouch for less than the boundary where another chain goes on in it.
            if ends and (match.depth * self._index.unit < boundary or NULL_BLOCK in blocks):
                return None
            entries += ((group.group_id, block, end) for block, end in zip(blocks, ends, strict=True))
        for group_id, block, _ in entries:
            self._pins.pin(group_id, block)
        return HandOff(boundary, tuple(entries))

    def release(self, hand_offs: Iterable[HandOff]) -> None:
        """Give the pins back: nobody needs the blocks any more."""
        for hand_off in hand_offs:
            self._pins.unpin(hand_off.blocks())


def block_ends(group: GroupSpec, first_token: int, boundary: int) -> list[int]:
    """Where the blocks that cover `[first_token, boundary)` end, as far as the boundary needs them."""
    if first_token >= boundary:
        return []
    if group.is_state:
        return [boundary]
    size = group.block_size
    first = first_token // size
    if group.window is not None:
        first = max(first, window_first_block(boundary, group.window, size))
    return [min((block + 1) * size, boundary) for block in range(first, -(-boundary // size))]
