"""The scheduler's line to the connector: hand-offs go out, tables are kept where it asks for it, loads come in.

There is always one; without a connector it is the base class's, which wants nothing and has nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dalsegno.connector.base import BoundPool, ConnectorOutput, SchedulerConnector
from dalsegno.kv.manager import KVCacheManager
from dalsegno.kv.ranks import RankReports
from dalsegno.request import Request
from dalsegno.sched.external import ExternalLoads
from dalsegno.types import Clock, StepPlan

__all__ = ["Connection", "ConnectorSetup"]


@dataclass(frozen=True, slots=True)
class ConnectorSetup:
    """A connector and how long the engine waits for it, in seconds.

    Attributes:
        connector: the scheduler side; its worker sides belong to the worker.
        world_size: how many worker sides there are, one per rank.
        load_timeout_s: a request for its load; then it goes on without.
        job_timeout_s: an answer that is to name what is stored, for its store jobs.
        close_timeout_s: `close` for all store jobs; then they are dropped.
        load_failure_ends_request: whether a failed load is an error and no miss.
    """

    connector: SchedulerConnector = field(default_factory=SchedulerConnector)
    world_size: int = 1
    load_timeout_s: float = 30.0
    job_timeout_s: float = 30.0
    close_timeout_s: float = 30.0
    load_failure_ends_request: bool = False


class Connection:
    """Binds a connector to the manager's pool and passes on what happens. Used on the engine thread only.

    Attributes:
        connector: the scheduler side.
        loads: requests that wait for loads.
    """

    def __init__(self, manager: KVCacheManager, setup: ConnectorSetup, clock: Clock) -> None:
        """Bind the connector of `setup`."""
        self.connector = setup.connector
        self.connector.bind_block_pool(BoundPool(manager.layout, manager.index, manager.pins))
        manager.bind_connector(self.connector)
        manager.loads.world_size = setup.world_size
        self._world_size = setup.world_size
        self.loads = ExternalLoads(
            manager,
            self.connector,
            clock,
            timeout_s=setup.load_timeout_s,
            fails_requests=setup.load_failure_ends_request,
        )
        self._manager = manager
        # Ended requests whose tables the connector asked to keep, by id, and the ranks that need them no longer.
        self._kept: dict[str, tuple[Request, RankReports]] = {}

    @property
    def has_push_work(self) -> bool:
        """Whether the worker side must be told something even if no request runs."""
        return self.connector.has_pending_push_work()

    @property
    def keeps_tables(self) -> bool:
        """Whether a table outlives its request."""
        return bool(self._kept)

    def keeps(self, request_id: str) -> bool:
        """Whether the table of an ended request of this id is kept."""
        return request_id in self._kept

    def with_meta(self, plan: StepPlan) -> StepPlan:
        """The plan with what the connector tells its worker side."""
        return replace(plan, connector_meta=self.connector.build_connector_meta(plan))

    def register_step(self, running: Mapping[str, Request]) -> None:
        """Hand over what the commit of a step made for requests that go on."""
        for request_id, offloads in self._manager.take_partial_tail_offloads().items():
            request = running[request_id]
            self.connector.register_partial_tail(request, self._computed_tables(request), offloads)

    def let_go(self, request: Request) -> bool:
        """A request that holds blocks has ended: hand over its last. Whether its table is kept for now."""
        offloads = self._manager.finalize_partial_tail_offloads(request)
        tables = self._computed_tables(request)
        keeps_tail = self.connector.register_finished_partial_tail(request, tables, offloads)
        keeps, request.kv_transfer_answer = self.connector.request_finished(request, tables)
        if keeps_tail or keeps:
            self._kept[request.request_id] = request, RankReports(self._world_size)
        return keeps_tail or keeps

    def ended(self, request: Request) -> None:
        """A request that holds nothing has ended."""
        tables: list[Sequence[int]] = [()] * len(self._manager.layout.groups)
        _, request.kv_transfer_answer = self.connector.request_finished(request, tables)

    def take(self, output: ConnectorOutput) -> tuple[list[Request], list[Request]]:
        """Take what a rank reports; requests that go on after a load, and those it ends."""
        self.connector.update_connector_output(output)
        sent = [request_id for request_id in output.sent if request_id in self._kept]
        self._free(request_id for request_id in sent if self._kept[request_id][1].add(output.rank))
        return self.loads.take(output)

    def free_kept(self) -> None:
        """The connector will not name what it asked to keep any more."""
        self._free(list(self._kept))

    def _free(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._manager.free(self._kept.pop(request_id)[0])

    def _computed_tables(self, request: Request) -> list[Sequence[int]]:
        """The request's tables, as far as their tokens are computed."""
        return [
            table[: -(-request.num_computed_tokens // group.block_size)]
            for group, table in zip(self._manager.layout.groups, self._manager.block_tables(request), strict=True)
        ]
