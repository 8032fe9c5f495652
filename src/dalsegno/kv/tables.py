"""What one admitted request holds: block tables, its state blocks, and what its next step reads besides them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dalsegno.kv.hand_off import HandOff
from dalsegno.types import NULL_BLOCK, BlockCopy, BlockHash, StateExport

__all__ = ["ComputedBlocks", "RequestBlocks", "StateBlocks"]


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """A hit, as blocks. Holds no reference: it is valid until the next call that allocates or frees.

    Attributes:
        boundary: tokens that are there.
        tables: per group the blocks that cover them, the null block where a window group needs none; empty for state.
        state_block: the boundary state, or the null block.
        root, hashes: the chain the hit was found on.
        boundary_by_group: the longest boundary of each group alone.
    """

    boundary: int
    tables: tuple[tuple[int, ...], ...]
    state_block: int
    root: BlockHash
    hashes: Sequence[BlockHash]
    boundary_by_group: dict[str, int]

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Iterate over (group, block) of all that restores the boundary; a state group is the last one."""
        for group_id, table in enumerate(self.tables):
            yield from ((group_id, block) for block in table)
        yield len(self.tables) - 1, self.state_block


@dataclass(slots=True)
class StateBlocks:
    """A request's state blocks; every block named here carries one reference of the request.

    Attributes:
        current: holds the state after all computed tokens; the null block after none. It is written in place only
            while it is *private*: unpublished and referenced by nobody else.
        write: where the step in flight writes the new state; None before it is decided.
        keeps_current: the step in flight leaves `current` whole, as an answer state.
        kept: the last answer state, (boundary, block), private until the request ends.
        exports: (boundary, block) the step in flight writes boundary states to.
    """

    current: int = NULL_BLOCK
    write: int | None = None
    kept: tuple[int, int] | None = None
    keeps_current: bool = False
    exports: list[tuple[int, int]] = field(default_factory=list)

    def step_exports(self, start: int) -> tuple[StateExport, ...]:
        """The exports of a step that begins at token `start`."""
        return tuple(StateExport(boundary - start, block) for boundary, block in self.exports)

    def held(self) -> list[int]:
        """All blocks the request holds a reference on, the null block excluded."""
        blocks = [self.current] if self.current else []
        if self.write is not None and self.write != self.current and (self.kept is None or self.write != self.kept[1]):
            blocks.append(self.write)
        if self.kept is not None:
            blocks.append(self.kept[1])
        return blocks + [block for _, block in self.exports]


@dataclass(slots=True)
class RequestBlocks:
    """Everything an admitted request holds.

    Token ranges, with c = computed tokens:

        [0, published)   boundaries the index was told of (multiples of H)
        [published, c)   written, less than one unit or not worth a hash (caching off)
        [c, end of table) allocated for the step in flight

    Attributes:
        tables: per group, logical block index to block id; empty for the state group. Each block carries one reference.
        state: the state blocks, None in a model without state group.
        planned: boundaries this admission wants a state kept at, rising; those passed are removed at commit.
        used_states: boundaries whose states this admission resumed from or published; they are used again when it lets
            go, because a chain's states are worth as much as all its attention.
        published: see above.
        hit: the boundary this admission resumed from, until the connector was told of it; 0 for none.
        copies: copies the next step starts with; each carries a reference on its source.
        window_released: per group, table entries given back because they left the window.
        packed: the request takes no more slabs than `KVCacheManager.slabs_alone` counts, so that it cannot run out of
            room: no hit and no adopted block, which may lie anywhere, no wishes, and open blocks before new slabs.
        hand_offs: made and not yet taken by the connector, by rising boundary.
    """

    tables: list[list[int]]
    state: StateBlocks | None
    planned: list[int]
    used_states: list[int] = field(default_factory=list)
    published: int = 0
    hit: int = 0
    copies: list[BlockCopy] = field(default_factory=list)
    window_released: list[int] = field(default_factory=list)
    packed: bool = False
    hand_offs: list[HandOff] = field(default_factory=list)
