"""Loads: blocks that somebody outside fills, for a request that waits for them.

The targets belong to the load, not to the request: whatever becomes of the request, they stay pinned until every rank
has reported. What is verified is published like any computed block, and the request then finds it as a local hit; the
pins hold until it is admitted. Published blocks of others are never written: a target is always a fresh block.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dalsegno.kv.hand_off import block_ends
from dalsegno.kv.index import PrefixIndex
from dalsegno.kv.layout import GroupSpec
from dalsegno.kv.pins import BlockPins
from dalsegno.kv.pool import SlabPool
from dalsegno.kv.ranks import RankReports
from dalsegno.kv.tables import ComputedBlocks
from dalsegno.request import Request
from dalsegno.types import NULL_BLOCK, BlockHash, LoadFailure

__all__ = ["Load", "Loads"]


@dataclass(slots=True, eq=False)
class Load:
    """One load.

    Attributes:
        load_id: never used again; a request id may be.
        request_id: who waits for it.
        root, hashes: the chain that is loaded, up to `boundary` at least.
        boundary: what is restored when nothing fails.
        local_boundary: what was there before.
        targets: per group, block index to the block that is to be filled; a state's index is 0.
        pins: (group, block) of everything the load holds.
        reports: ranks that have reported.
        failures: what they could not restore.
        wanted: whether the request still waits; else nothing is published.
    """

    load_id: int
    request_id: str
    root: BlockHash
    hashes: Sequence[BlockHash]
    boundary: int
    local_boundary: int
    targets: tuple[dict[int, int], ...]
    reports: RankReports
    failures: list[LoadFailure] = field(default_factory=list)
    pins: list[tuple[int, int]] = field(default_factory=list)
    wanted: bool = True


class Loads:
    """Loads from their start to the report of the last rank. Used on the engine thread only.

    Attributes:
        active: loads that some rank has not reported, by id.
        world_size: how many ranks there are.
    """

    def __init__(self, index: PrefixIndex, pool: SlabPool, pins: BlockPins) -> None:
        """Take targets from `pool` and publish them to `index`."""
        self._index = index
        self._pool = pool
        self._pins = pins
        self._count = 0
        self.active: dict[int, Load] = {}
        self.world_size = 1

    def start(self, request: Request, computed: ComputedBlocks, boundary: int) -> Load | None:
        """Pin what is there, and take a block for everything else that `boundary` needs.

        Args:
            request: waiting, with hashes up to `boundary`.
            computed: its local hit, still valid.
            boundary: beyond the local hit.

        Returns:
            The load, or None: no room beside the largest request, and no reference has changed.
        """
        local: list[tuple[int, int]] = list(computed.blocks())
        missing: list[list[int]] = []
        for group in self._index.groups:
            there, absent = self._split(group, request, computed, boundary)
            local += there
            missing.append(absent)
        needs = [len(absent) for absent in missing]
        if not self._pins.has_room(self._pool.slabs_needed(needs)):
            return None
        for group_id, block in local:
            self._pins.pin(group_id, block)
        taken = self._pool.allocate(needs, [NULL_BLOCK] * len(needs))
        if taken is None:
            self._pins.unpin(local)
            return None
        load = Load(
            load_id=self._count,
            request_id=request.request_id,
            root=request.root_hash,
            hashes=request.block_hashes[: boundary // self._index.unit],
            boundary=boundary,
            local_boundary=computed.boundary,
            targets=tuple(dict(zip(at, blocks, strict=True)) for at, blocks in zip(missing, taken, strict=True)),
            reports=RankReports(self.world_size),
            pins=local,
        )
        for group_id, blocks in enumerate(taken):
            for block in blocks:
                self._pins.adopt(group_id, block)
                load.pins.append((group_id, block))
        if not self._pins.has_room():
            self.release(load)
            return None
        self._count += 1
        self.active[load.load_id] = load
        return load

    def report(self, load_id: int, rank: int, failures: Iterable[LoadFailure]) -> Load | None:
        """Take a rank's report. Behind the last one publish what every rank has, if it is wanted, and free the rest.

        What is published stays pinned until `release`.

        Returns:
            The load if that was the last report and somebody waits for it; None otherwise, and for an id that is not
            active.
        """
        load = self.active.get(load_id)
        if load is None or load.reports.has(rank):
            return None
        load.failures += failures
        if not load.reports.add(rank):
            return None
        del self.active[load_id]
        if not load.wanted:
            self.release(load)
            return None
        for group in self._index.groups:
            for position, block in load.targets[group.group_id].items():
                end = load.boundary if group.is_state else min((position + 1) * group.block_size, load.boundary)
                start = 0 if group.is_state else position * group.block_size
                if any(
                    f.group_id == group.group_id and f.first_token < end and start < f.boundary for f in load.failures
                ):
                    self._give_back(load, group.group_id, block)
                    continue
                published = self._index.publish(group.group_id, load.root, load.hashes, end, block)
                if published != block:
                    self._pins.pin(group.group_id, published)
                    load.pins.append((group.group_id, published))
                    self._give_back(load, group.group_id, block)
        return load

    def abandon(self, load: Load) -> None:
        """Nobody waits any more; the blocks are freed when every rank has reported."""
        load.wanted = False

    def release(self, load: Load) -> None:
        """Give back everything the load holds; it has been reported or was never started."""
        pins, load.pins = load.pins, []
        self._pins.unpin(pins)

    def _give_back(self, load: Load, group_id: int, block: int) -> None:
        load.pins.remove((group_id, block))
        self._pins.unpin([(group_id, block)])

    def _split(
        self, group: GroupSpec, request: Request, computed: ComputedBlocks, boundary: int
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """What of the group's need is there, as (group, block), and the indices of the blocks that are not."""
        if group.prefix == "none":
            return [], []
        there: list[tuple[int, int]] = []
        absent: list[int] = []
        match = self._index.match(request.root_hash, request.block_hashes, boundary)
        for end in block_ends(group, 0, boundary):
            block = self._index.vouching(match, group.group_id, end)
            if block == NULL_BLOCK:
                absent.append(0 if group.is_state else (end - 1) // group.block_size)
            else:
                there.append((group.group_id, block))
        return there, absent
