"""The store connector's scheduler side: what is stored, what is looked up, what is loaded.

It asks the store only whether objects exist; bytes are the worker sides'. `create` makes all sides over one store.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from dalsegno.connector.base import BoundPool, ConnectorOutput, ExternalMatch, MatchStatus, SchedulerConnector
from dalsegno.connector.config import KVTransferConfig
from dalsegno.connector.registry import ConnectorContext, Sides
from dalsegno.connector.store.jobs import StoreJobs
from dalsegno.connector.store.keys import KeyMaker
from dalsegno.connector.store.lookup import StoreMatch
from dalsegno.connector.store.lookups import Lookups
from dalsegno.connector.store.messages import LoadJob, StepMeta, StoredObject, WorkerMeta
from dalsegno.connector.store.objects import ObjectMap
from dalsegno.connector.store.settings import StoreSettings
from dalsegno.connector.store.shared_store import SharedStore
from dalsegno.connector.store.worker import StoreWorker
from dalsegno.kv.hand_off import HandOff, HandOffs
from dalsegno.kv.loads import Load
from dalsegno.kv.ranks import RankReports
from dalsegno.kv.tables import ComputedBlocks
from dalsegno.request import Request, RequestStatus
from dalsegno.store.base import Store
from dalsegno.store.keys import salt_tag
from dalsegno.types import NULL_BLOCK, StepPlan

__all__ = ["StoreScheduler", "create"]

logger = logging.getLogger(__name__)

_MISS = ExternalMatch(MatchStatus.MISS)


@dataclass(frozen=True, slots=True)
class _LoadUnderWay:
    request: Request
    epoch: int
    objects: tuple[StoredObject, ...]
    reports: RankReports
    failed: set[tuple[int, int]] = field(default_factory=set)


def create(config: KVTransferConfig, context: ConnectorContext) -> Sides:
    """Open the store and make the sides; each of them must be shut down.

    Raises:
        OptionError: a setting is unknown or not allowed, or the store cannot be opened.
    """
    block_size = context.cache_config.block_size
    settings = StoreSettings.parse(config, block_size)
    shared = SharedStore(_open(settings), 1 + len(context.ranks))
    tokens = settings.object_tokens(block_size)
    keys = [KeyMaker(context, rank, tokens, settings.cache_prefix) for rank in range(context.world_size)]
    namespaces = sorted({name for maker in keys for name in maker.namespaces})
    logger.info("%s: %s, namespace %s", config.kv_connector, config.kv_role, ", ".join(namespaces))
    scheduler = StoreScheduler(config.kv_role, settings, context, shared, keys)
    return scheduler, [StoreWorker(shared, keys[rank], context, settings) for rank in context.ranks]


def _open(settings: StoreSettings) -> Store:
    """Open the configured store; in Python "store" may also be one that is open."""
    given = settings.store.get("store")
    if given is not None and not isinstance(given, str):
        return cast(Store, given)
    from dalsegno.store.registry import open_store

    return open_store(settings.store)


class StoreScheduler(SchedulerConnector):
    """See `SchedulerConnector`. Saves prompts and answers as the role says; every role looks up."""

    def __init__(
        self,
        role: str,
        settings: StoreSettings,
        context: ConnectorContext,
        shared: SharedStore,
        keys: Sequence[KeyMaker],
    ) -> None:
        """Look up in the shared store; `keys` are those of every rank."""
        self._saves_prompts = role != "kv_consumer"
        saves_answers = settings.save_decode_cache
        self._saves_answers = role == "kv_both" if saves_answers is None else saves_answers
        self._settings = settings
        self._layout = context.layout
        self._unit = context.cache_config.hash_block_size
        self._objects = ObjectMap(context.layout, settings.object_tokens(context.cache_config.block_size))
        self._context = context
        self._shared = shared
        self._keys = keys
        self._world_size = len(keys)
        # What each rank has said last: the epoch its part of the store was emptied for, and its number of clearings.
        self._cleared_by_rank = [0] * len(keys)
        self._clears_by_rank = [0] * len(keys)
        self._asked_clears = 0
        self._must_clear = False
        self._removals: list[tuple[str, tuple[StoredObject, ...]]] = []
        self._loads_outbox: list[LoadJob] = []
        self._loads: dict[int, _LoadUnderWay] = {}
        self._matches: dict[Request, StoreMatch] = {}

    def bind_block_pool(self, pool: BoundPool) -> None:
        """See the base class."""
        super().bind_block_pool(pool)
        hand_offs = HandOffs(pool.pins, pool.index)
        hand_offs.sink = self
        limit = self._settings.max_store_backlog_bytes
        self._jobs = StoreJobs(pool, hand_offs, self._objects, limit, self._world_size)
        self._lookups = Lookups(
            self._settings, self._context, self._objects, pool.index, self._shared.store, self._keys
        )

    def on_progress(self, callback: Callable[[], None]) -> None:
        """See the base class."""
        self._lookups.start(callback)

    # Saving.

    def saves(self, request: Request, boundary: int) -> bool:
        """See `HandOffSink.saves`."""
        if request.no_store:
            return False
        return self._saves_prompts if boundary <= request.num_prompt_tokens else self._saves_answers

    def first_needed(self, request: Request, group_id: int, boundary: int, listed: int) -> int:
        """See `HandOffSink.first_needed`."""
        return self._jobs.first_needed(request, group_id, boundary, listed)

    def register_partial_tail(
        self, request: Request, block_ids: Sequence[Sequence[int]], offloads: Iterable[HandOff]
    ) -> None:
        """See the base class."""
        for hand_off in offloads:
            self._jobs.register(request, hand_off)

    def request_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See the base class; what the caller is told comes with `take_transfer_params`."""
        self._matches.pop(request, None)
        self._lookups.forget(request)
        return False, None

    def is_answer_held(self, request: Request) -> bool:
        """See the base class."""
        return self._jobs.is_held(request)

    def take_transfer_params(self, request: Request) -> dict[str, Any] | None:
        """Name the boundary of the request that is in the store."""
        return {"do_remote_prefill": True, "stored_boundary": self._jobs.take_stored_boundary(request)}

    def forget_prefix(self, request: Request) -> None:
        """See `HandOffSink.forget_prefix`."""
        known = len(request.block_hashes) * self._unit
        objects = [
            StoredObject(group.group_id, first, end, request.block_hashes[end // self._unit - 1])
            for group in self._objects.groups
            for first, end in self._objects.possible(group, known, self._unit)
        ]
        for item in objects:
            self._jobs.known.discard(item.ref)
        self._removals.append((salt_tag(request.cache_salt), tuple(objects)))

    # Looking up and loading.

    def get_num_new_matched_tokens(self, request: Request, local: ComputedBlocks) -> ExternalMatch:
        """See the base class; the same question again, soon, has the same answer as far as it still holds."""
        self._matches.pop(request, None)
        self._forget_gone()
        if self._cleared() < self._jobs.epoch:
            # The store may hold what a reset was to remove: it is asked for nothing until it has been emptied.
            self._must_clear = self._must_clear or self._num_clears() == self._asked_clears
        if not self._settings.enable_lookup:
            return ExternalMatch(MatchStatus.NONE)
        if self._cleared() < self._jobs.epoch:
            return _MISS
        done, match = self._lookups.poll(request, local, self._jobs.epoch)
        if not done:
            return ExternalMatch(MatchStatus.PENDING)
        self._forget_gone()
        if match is None:
            return ExternalMatch(MatchStatus.MISS, unsure=True)
        if match.boundary <= local.boundary or not self._lookups.still_holds(match, request):
            return ExternalMatch(MatchStatus.MISS, shared_tokens=match.shared, unsure=match.unsure)
        self._matches[request] = match
        num_tokens = match.boundary - local.boundary
        return ExternalMatch(MatchStatus.HIT, num_tokens, self._settings.load_async, match.shared, match.unsure)

    def update_state_after_alloc(self, request: Request, load: Load) -> None:
        """See the base class."""
        self._lookups.use(request)
        match = self._matches.pop(request)
        objects = []
        for item in match.objects:
            targets = load.targets[item.group_id]
            group = self._layout.groups[item.group_id]
            indices = range(1)
            if not group.is_state:
                indices = range(item.first_token // group.block_size, -(-item.boundary // group.block_size))
            blocks = tuple(targets.get(index, NULL_BLOCK) for index in indices)
            if any(blocks):
                objects.append(StoredObject(item.group_id, item.first_token, item.boundary, item.block_hash, blocks))
        reports = RankReports(self._world_size)
        self._loads[load.load_id] = _LoadUnderWay(request, self._jobs.epoch, tuple(objects), reports)
        self._loads_outbox.append(LoadJob(load.load_id, salt_tag(request.cache_salt), tuple(objects)))

    # Speaking with the worker side.

    def build_connector_meta(self, plan: StepPlan) -> StepMeta | None:
        """See the base class."""
        if not self.has_pending_push_work():
            return None
        step_meta = StepMeta(
            self._jobs.epoch,
            tuple(self._loads_outbox),
            tuple(self._jobs.outbox),
            self._must_clear,
            tuple(self._removals),
        )
        self._removals = []
        self._asked_clears += self._must_clear
        self._loads_outbox, self._jobs.outbox, self._must_clear = [], [], False
        return step_meta

    def has_pending_push_work(self) -> bool:
        """See the base class."""
        return bool(self._loads_outbox or self._jobs.outbox or self._must_clear or self._removals)

    def has_pending_jobs(self) -> bool:
        """See the base class."""
        return len(self._jobs) > 0 or bool(self._loads) or self._num_clears() < self._asked_clears

    def update_connector_output(self, output: ConnectorOutput) -> None:
        """See the base class."""
        failed = output.failed
        for load_id in output.received & self._loads.keys():
            load = self._loads[load_id]
            load.failed.update((failure.group_id, failure.boundary) for failure in failed if failure.load_id == load_id)
            if load.reports.add(output.rank):
                del self._loads[load_id]
                self._end_load(load)
        said, rank = output.worker_meta, output.rank
        if isinstance(said, WorkerMeta):
            for report in said.reports:
                self._jobs.finish(rank, report)
            self._cleared_by_rank[rank] = max(self._cleared_by_rank[rank], said.cleared)
            self._clears_by_rank[rank] = max(self._clears_by_rank[rank], said.num_clears)

    def _end_load(self, load: _LoadUnderWay) -> None:
        for item in load.objects:
            if (item.group_id, item.boundary) not in load.failed:
                if load.epoch == self._jobs.epoch:
                    self._jobs.known.add(item.ref)
                continue
            self._jobs.known.discard(item.ref)
            if load.request.status is not RequestStatus.FINISHED:
                self._lookups.exclude(load.request, item.ref)

    def reset_cache(self) -> bool:
        """Empty this engine's part of the store; until that has been done nothing is looked up or stored."""
        self._jobs.reset()
        self._must_clear = True
        return True

    def stats(self) -> Mapping[str, int | float]:
        """See the base class."""
        return {
            **self._lookups.counters,
            **self._jobs.counters,
            **{f"kv_store_{name}": value for name, value in self._shared.store.stats().items()},
            "kv_offload_lookup_timeouts": self._lookups.num_timeouts,
            "kv_offload_pending_jobs": len(self._jobs),
            "kv_offload_backlog_bytes": self._jobs.backlog_bytes,
        }

    def shutdown(self) -> None:
        """See the base class; also without `bind_block_pool` before."""
        hangs = hasattr(self, "_lookups") and self._lookups.shutdown()
        self._shared.leave(hangs=hangs)

    def _cleared(self) -> int:
        """The last epoch before whose jobs every rank's part of the store was emptied."""
        return min(self._cleared_by_rank)

    def _num_clears(self) -> int:
        """Clearings that every rank has ended, the failed ones included."""
        return min(self._clears_by_rank)

    def _forget_gone(self) -> None:
        """What lookups have missed is not known to be stored any more, and can be stored again."""
        for ref in self._lookups.take_gone():
            self._jobs.known.discard(ref)
