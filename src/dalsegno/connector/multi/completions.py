"""What of the children's reports the engine hears: each load once, each kept table when the last child is done with it.

A load has one child that does it. Reports of others, of unknown loads, and second ones are not passed on.
"""

from dataclasses import dataclass, field

from dalsegno.connector.base import ConnectorOutput
from dalsegno.kv.ranks import RankReports
from dalsegno.types import LoadFailure

__all__ = ["Completions"]


@dataclass(frozen=True, slots=True)
class _Load:
    child: int
    reports: RankReports


@dataclass(slots=True)
class Completions:
    """Loads and kept tables that some rank still owes a word on. Used on the engine thread only.

    Attributes:
        world_size: how many ranks there are.
    """

    world_size: int
    _loads: dict[int, _Load] = field(default_factory=dict)
    # For each kept table, by rank, the children that still need it there.
    _needed: dict[str, list[set[int]]] = field(default_factory=dict)

    @property
    def awaits_loads(self) -> bool:
        """Whether a load has not been reported by every rank."""
        return bool(self._loads)

    def begin_load(self, load_id: int, child: int) -> None:
        """The child of this index is the one to report the load."""
        self._loads[load_id] = _Load(child, RankReports(self.world_size))

    def end_request(self, request_id: str, children: set[int]) -> None:
        """A request that holds blocks has ended; these children ask for its table."""
        self._needed[request_id] = [set(children) for _ in range(self.world_size)]

    def finish_request(self, request_id: str, children: set[int]) -> None:
        """Behind `end_request`, if the request held blocks: these children ask for its table too."""
        needed = self._needed.get(request_id, [])
        for of_rank in needed:
            of_rank |= children
        if not any(needed):
            self._needed.pop(request_id, None)

    def take(self, child: int, own: ConnectorOutput, output: ConnectorOutput) -> None:
        """Pass on from a child's `own` output what the engine is to act on."""
        for load_id in own.received:
            self._end_load(child, load_id, [failure for failure in own.failed if failure.load_id == load_id], output)
        for request_id in own.sent & self._needed.keys():
            needed = self._needed[request_id]
            needed[output.rank].discard(child)
            if not needed[output.rank]:
                output.sent.add(request_id)
            if not any(needed):
                del self._needed[request_id]

    def _end_load(self, child: int, load_id: int, failed: list[LoadFailure], output: ConnectorOutput) -> None:
        load = self._loads.get(load_id)
        if load is None or load.child != child or load.reports.has(output.rank):
            return
        output.received.add(load_id)
        output.failed += failed
        if load.reports.add(output.rank):
            del self._loads[load_id]
