"""Waiting requests and the connector: who asks it, who waits for a load, and what becomes of them.

A request that loads is neither waiting nor running and holds nothing: its targets belong to the load. When every rank
has reported it waits again, and finds what was loaded as a local hit. A load that does not report in time is left
behind; its blocks stay pinned until it does, and nobody else begins one until then or for as long again: what hangs
there hangs for all.
"""

from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto, unique

from dalsegno.connector.base import ConnectorOutput, MatchStatus, SchedulerConnector
from dalsegno.hit_report import HitReport, LostReason
from dalsegno.kv.loads import Load
from dalsegno.kv.manager import KVCacheManager
from dalsegno.kv.tables import ComputedBlocks
from dalsegno.request import Request
from dalsegno.types import Clock, LoadFailure

__all__ = ["Decision", "ExternalLoads"]

_COUNTERS = (
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "kv_loads",
    "kv_load_failures",
    "kv_load_timeouts",
    "kv_load_no_room",
    "kv_load_lookups_skipped",
    "kv_load_recovered_tokens",
)
_MAX_ROUNDS = 2


@unique
class Decision(Enum):
    """What to do with a request at the head of the queue."""

    ADMIT = auto()
    LOOK_AGAIN = auto()
    """Admit it, after a new local lookup."""
    WAIT = auto()
    LOAD = auto()


@dataclass(slots=True)
class _Asked:
    """What the connector was asked for one stay of a request in the queue, and until when it may load."""

    rounds: int = 0
    local_boundary: int = 0
    has_reported: bool = False
    unsure: bool = False
    failed_boundary: int = 0
    deadline: float = 0.0
    blocks_engine: bool = False


class ExternalLoads:
    """Owns the loading requests. Used on the engine thread only.

    Attributes:
        loading: requests whose load has not been reported, with it.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        connector: SchedulerConnector,
        clock: Clock,
        *,
        timeout_s: float,
        fails_requests: bool,
    ) -> None:
        """Ask `connector`.

        Args:
            manager: whose loads these are.
            connector: bound to the manager's pool.
            clock: the engine's.
            timeout_s: how long a request waits for a load.
            fails_requests: whether a failed load ends the request instead of being a miss.
        """
        self._manager = manager
        self._connector = connector
        self._clock = clock
        self._timeout_s = timeout_s
        self._fails_requests = fails_requests
        self.loading: dict[Request, Load] = {}
        self._landed: dict[Request, Load] = {}
        self._asked: dict[Request, _Asked] = {}
        self._pending: set[Request] = set()
        self._overdue: set[int] = set()
        self._try_again_at = 0.0
        self.counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))

    @property
    def is_waited_for(self) -> bool:
        """Whether some request can go on only when the connector answers."""
        return bool(self.loading or self._pending)

    @property
    def blocks_engine(self) -> bool:
        """Whether a load is under way that nothing may run beside."""
        return any(self._asked[request].blocks_engine for request in self.loading)

    def deadline(self) -> float | None:
        """When the next load is overdue, on the engine's clock."""
        return min((self._asked[request].deadline for request in self.loading), default=None)

    def consider(self, request: Request, computed: ComputedBlocks) -> Decision:
        """Ask the connector, once per stay in the queue, whether it has more than the local hit; begin the load."""
        asked = self._asked.setdefault(request, _Asked())
        if asked.rounds >= _MAX_ROUNDS or request.looks_nothing_up:
            return Decision.ADMIT
        if self._overdue and self._clock.now() < self._try_again_at:
            # Counts as a miss: the store does not answer.
            self.counters["kv_load_lookups_skipped"] += 1
            asked.unsure = True
            if not asked.rounds:
                asked.local_boundary = computed.boundary
            asked.rounds = _MAX_ROUNDS
            return Decision.ADMIT
        match = self._connector.get_num_new_matched_tokens(request, computed)
        self._pending.discard(request)
        if match.status is MatchStatus.PENDING:
            self._pending.add(request)
            return Decision.WAIT
        if match.status is MatchStatus.NONE:
            return Decision.ADMIT
        if not asked.rounds:
            asked.local_boundary = computed.boundary
        asked.rounds = _MAX_ROUNDS
        asked.unsure = match.unsure
        request.shared_boundary = max(request.shared_boundary, match.shared_tokens)
        if match.status is MatchStatus.MISS or match.num_tokens <= 0:
            return Decision.ADMIT
        boundary = computed.boundary + match.num_tokens
        load = self._manager.loads.start(request, computed, boundary)
        if load is None:
            self.counters["kv_load_no_room"] += 1
            return Decision.LOOK_AGAIN
        self.counters["kv_loads"] += 1
        self.release(request)
        self._connector.update_state_after_alloc(request, load)
        asked.deadline = self._clock.now() + self._timeout_s
        asked.blocks_engine = not match.load_async
        self.loading[request] = load
        return Decision.LOAD

    def take(self, output: ConnectorOutput) -> tuple[list[Request], list[Request]]:
        """Take reports of loads; return the requests that go on and those that end with an error."""
        failures: dict[int, list[LoadFailure]] = {}
        for failure in output.failed:
            failures.setdefault(failure.load_id, []).append(failure)
        by_id = {load.load_id: request for request, load in self.loading.items()}
        back: list[Request] = []
        ended: list[Request] = []
        for load_id in sorted(output.received):
            load = self._manager.loads.report(load_id, output.rank, failures.get(load_id, ()))
            if load is None:
                continue
            request = by_id[load_id]
            del self.loading[request]
            asked = self._asked[request]
            self._landed[request] = load
            if not self._manager.pins.has_room():
                # Blocks published meanwhile lie in slabs of their own; those pins are no need of anybody's.
                self.release(request)
            asked.has_reported = True
            if load.failures and self._fail(request, load):
                ended.append(request)
                continue
            back.append(request)
        self._overdue &= self._manager.loads.active.keys()
        return back, ended

    def expire(self) -> tuple[list[Request], list[Request]]:
        """Leave overdue loads behind; return the requests that go on and those that end with an error."""
        now = self._clock.now()
        overdue = [request for request in self.loading if self._asked[request].deadline <= now]
        back: list[Request] = []
        ended: list[Request] = []
        for request in overdue:
            load = self.loading.pop(request)
            self._manager.loads.abandon(load)
            self._overdue.add(load.load_id)
            self._try_again_at = now + self._timeout_s
            self.counters["kv_load_timeouts"] += 1
            fails = self._fail(request, load)
            self._asked[request].rounds = _MAX_ROUNDS
            (ended if fails else back).append(request)
        return back, ended

    def release(self, request: Request) -> None:
        """The request has found what was loaded for it, or waits for nothing more; the blocks stay cached."""
        self._pending.discard(request)
        load = self._landed.pop(request, None)
        if load is not None:
            self._manager.loads.release(load)

    def forget(self, request: Request) -> None:
        """The request has ended, or goes back to the queue: nothing was asked for it."""
        self.release(request)
        self._asked.pop(request, None)
        loading = self.loading.pop(request, None)
        if loading is not None:
            self._manager.loads.abandon(loading)

    def explain(self, request: Request, boundary: int, report: HitReport) -> None:
        """Say in the report of an admission at `boundary` what the store gave and what it did not."""
        asked = self._asked.get(request)
        if asked is None or not asked.rounds:
            return
        self.counters["external_prefix_cache_queries"] += request.num_tokens
        from_store = max(0, boundary - asked.local_boundary) if asked.has_reported else 0
        if from_store:
            report.cached_by_tier = {"device": asked.local_boundary} if asked.local_boundary else {}
            report.cached_by_tier["store"] = from_store
            self.counters["external_prefix_cache_hits"] += from_store
            if asked.failed_boundary:
                self.counters["kv_load_recovered_tokens"] += from_store
        lost_here = (LostReason.NEW, LostReason.EVICTED, LostReason.DIVERGED, LostReason.NO_BOUNDARY_STATE)
        report.recharge(lost_here, LostReason.LOAD_FAILED, max(0, asked.failed_boundary - boundary))
        missed = LostReason.STORE_ERROR if asked.unsure else LostReason.STORE_MISS
        report.recharge((LostReason.NEW, LostReason.EVICTED), missed)

    def _fail(self, request: Request, load: Load) -> bool:
        """Note a failed load; whether it ends the request."""
        self.counters["kv_load_failures"] += 1
        asked = self._asked[request]
        if not asked.failed_boundary:
            asked.rounds = _MAX_ROUNDS - 1
        asked.failed_boundary = max(asked.failed_boundary, load.boundary)
        if self._fails_requests:
            request.error = f"what was stored of its first {load.boundary} tokens could not be loaded"
        return self._fails_requests
