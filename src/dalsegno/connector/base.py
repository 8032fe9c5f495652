"""The connector interface: one class per side, and the values that pass between engine and connector.

Both base classes answer every notification with "nothing, False", so a connector overrides only what it does. The
scheduler side lives on the engine thread and owns decisions; the worker side lives beside the device memory and moves
bytes. They speak through `build_connector_meta` (scheduler to worker, with the step plan) and
`build_connector_worker_meta` (worker to scheduler, with `ConnectorOutput`), never through shared objects.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Any, Protocol

from dalsegno.kv.hand_off import HandOff
from dalsegno.kv.index import PrefixIndex
from dalsegno.kv.layout import MemoryLayout
from dalsegno.kv.loads import Load
from dalsegno.kv.pins import BlockPins
from dalsegno.kv.tables import ComputedBlocks
from dalsegno.request import Request
from dalsegno.types import LoadFailure, StepPlan

__all__ = [
    "BlockMemory",
    "BoundPool",
    "ConnectorOutput",
    "ExternalMatch",
    "MatchStatus",
    "SchedulerConnector",
    "WorkerConnector",
    "collect_output",
]


@unique
class MatchStatus(Enum):
    """What a connector knows of a prefix; NONE is said by one that does not look up."""

    NONE = "none"
    MISS = "miss"
    HIT = "hit"
    PENDING = "pending"


@dataclass(frozen=True, slots=True)
class ExternalMatch:
    """Answer to a lookup.

    Attributes:
        status: PENDING asks the scheduler to come again in a later step; the request waits, others pass it.
        num_tokens: on a hit, tokens beyond the local boundary that the connector can restore; the sum is a boundary of
            every group, at most the request's known tokens less one.
        load_async: whether other requests may run while the load does.
        shared_tokens: tokens from the beginning whose attention is there, with or without a state to resume from; a
            state is worth keeping where they end.
        unsure: whether it could not be found out, or not all of it.
    """

    status: MatchStatus
    num_tokens: int = 0
    load_async: bool = True
    shared_tokens: int = 0
    unsure: bool = False


@dataclass(slots=True)
class ConnectorOutput:
    """What the worker side of one rank reports. The engine acts on an id when the last rank has named it.

    Attributes:
        sent: ids of requests whose blocks a connector that asked for `delay_free` needs no longer.
        received: ids of loads that have ended, the failed ones included.
        failed: what of those loads was not restored.
        worker_meta: the connector's own, made by `build_connector_worker_meta`.
        rank: whose report it is.
    """

    sent: set[str] = field(default_factory=set)
    received: set[int] = field(default_factory=set)
    failed: list[LoadFailure] = field(default_factory=list)
    worker_meta: Any = None
    rank: int = 0


class BlockMemory(Protocol):
    """The device memory of one rank as bytes. The worker owns it; a connector reads and writes where it was told."""

    @property
    def memory(self) -> memoryview:
        """All of it, writable, one byte per item."""
        ...

    @property
    def path(self) -> str | None:
        """Where another process of this user can open the same memory; None if it is not shared."""
        ...

    def spans(self, group_id: int, block: int, num_tokens: int) -> Sequence[tuple[int, int]]:
        """Return (offset, length) of the bytes of a block's first `num_tokens` tokens, layer by layer, part by part.

        For a state group the whole state, whatever `num_tokens` says. Neighbouring spans are joined, so the bytes in
        order are the same for every cut of the memory, the number of spans is not.
        """
        ...


@dataclass(frozen=True, slots=True)
class BoundPool:
    """What a scheduler side may see of the KV cache: the layout, what is published, and the pins it is given."""

    layout: MemoryLayout
    index: PrefixIndex
    pins: BlockPins


class SchedulerConnector:
    """Decides what is loaded and stored. Every call is made on the engine thread and must not block for long.

    An exception from a call that is not documented to raise is an error of the connector: the engine does not
    recover from it.
    """

    pool: BoundPool

    def bind_block_pool(self, pool: BoundPool) -> None:
        """Called once, before anything else."""
        self.pool = pool

    def on_progress(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, from any thread, whenever a pending lookup has an answer. Called once."""

    def saves(self, request: Request, boundary: int) -> bool:
        """Whether anything up to `boundary` of this request will be stored; if not, no hand-off is made of it."""
        return False

    def first_needed(self, request: Request, group_id: int, boundary: int, listed: int) -> int:
        """See `dalsegno.kv.hand_off.HandOffSink`."""
        return 0

    def forget_prefix(self, request: Request) -> None:
        """See `dalsegno.kv.hand_off.HandOffSink`."""

    def get_num_new_matched_tokens(self, request: Request, local: ComputedBlocks) -> ExternalMatch:
        """How far beyond the local hit this prefix can be restored. Changes nothing the engine sees.

        Args:
            request: waiting, with the hashes of all its full units.
            local: its local hit; `boundary_by_group` is how far each group would reach alone.
        """
        return ExternalMatch(MatchStatus.NONE)

    def update_state_after_alloc(self, request: Request, load: Load) -> None:
        """A hit was taken: `load.targets` are to be filled. They stay pinned until every rank has reported the load."""

    def register_partial_tail(
        self, request: Request, block_ids: Sequence[Sequence[int]], offloads: Iterable[HandOff]
    ) -> None:
        """Take over hand-offs of a request that goes on, each entry with one pin.

        The connector gives every pin back through `pool.pins`, now or when it is done. `block_ids` are the request's
        tables as they are now; they end at computed tokens, and are the engine's own lists.
        """
        for hand_off in offloads:
            self.pool.pins.unpin(hand_off.blocks())

    def register_finished_partial_tail(
        self, request: Request, block_ids: Sequence[Sequence[int]], offloads: Iterable[HandOff]
    ) -> bool:
        """Take over the hand-offs of a request that ends, as `register_partial_tail`.

        Returns:
            delay_free: whether the engine keeps the request's tables until `ConnectorOutput.sent` names it.
        """
        self.register_partial_tail(request, block_ids, offloads)
        return False

    def request_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended; called once per request, with empty tables if it held none.

        Returns:
            delay_free as above, and what is told to the caller as `kv_transfer_params`.
        """
        return False, None

    def is_answer_held(self, request: Request) -> bool:
        """Whether the finished request's last update waits, as it asked with `do_remote_decode`."""
        return False

    def take_transfer_params(self, request: Request) -> dict[str, Any] | None:
        """What a held answer is completed with; called once, when it is held no longer or has waited too long."""
        return None

    def build_connector_meta(self, plan: StepPlan) -> object | None:
        """Return and forget what the worker side is to begin with this step; None for nothing."""
        return None

    def update_connector_output(self, output: ConnectorOutput) -> None:
        """Take what a rank reported. Ids may be unknown, late or repeated.

        The engine reads `sent`, `received` and `failed` behind this call, so that a connector made of others can say
        for all of them.
        """

    def has_pending_push_work(self) -> bool:
        """Whether `build_connector_meta` has something to say even if no request runs."""
        return False

    def has_pending_jobs(self) -> bool:
        """Whether the worker side still owes a report."""
        return False

    def reset_cache(self) -> bool:
        """Forget what is stored; work under way puts and publishes nothing any more. Whether it could be done."""
        return True

    def take_events(self) -> Iterable[object]:
        """Return and forget cache events."""
        return ()

    def stats(self) -> Mapping[str, int | float]:
        """Counters since the start, by metric name."""
        return {}

    def shutdown(self) -> None:
        """The engine ends, or does not start; the worker sides have been shut down before."""


class WorkerConnector:
    """Moves bytes of one rank. Calls come on the engine thread between and within steps; all of them return soon.

    Threads and processes of the connector's own touch only blocks that a load or a store job names, as long as it has
    not been reported.

    Attributes:
        needs_shared_memory: whether the memory it registers must be open to another process.
    """

    needs_shared_memory = False

    def register_kv_caches(self, memory: BlockMemory) -> None:
        """Called once, before the first step."""

    def start_load_kv(self, step_meta: object) -> None:
        """Begin the loads of a step's meta; before the forward."""

    def wait_for_save(self, step_meta: object) -> None:
        """Begin the saves of a step's meta; behind the forward, whose writes they may read."""

    def get_finished(self) -> tuple[set[str], set[int], list[LoadFailure]]:
        """Return and forget (sent, received, failed) as in `ConnectorOutput`."""
        return set(), set(), []

    def build_connector_worker_meta(self) -> object | None:
        """Return and forget what the scheduler side is to learn, such as store jobs that have ended."""
        return None

    def on_progress(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, from any thread, whenever there is something new to report."""

    def stats(self) -> Mapping[str, int | float]:
        """Counters since the start, by metric name."""
        return {}

    def shutdown(self) -> None:
        """End threads and processes, if they were started; what was not reported never is."""


def collect_output(connector: WorkerConnector, rank: int = 0) -> ConnectorOutput | None:
    """Ask the worker side of `rank` for everything it has to report; None for nothing."""
    sent, received, failed = connector.get_finished()
    worker_meta = connector.build_connector_worker_meta()
    if not sent and not received and not failed and worker_meta is None:
        return None
    return ConnectorOutput(sent, received, failed, worker_meta, rank)
