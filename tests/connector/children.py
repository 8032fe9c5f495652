"""Children of a MultiConnector: store connectors, and others that raise, keep tables, or report as a test likes."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dalsegno.connector.base import SchedulerConnector, WorkerConnector
from dalsegno.connector.config import KVTransferConfig
from dalsegno.connector.multi.scheduler import MultiScheduler
from dalsegno.connector.registry import ConnectorContext, Sides, create_connector
from dalsegno.request import Request
from dalsegno.store.base import Store
from dalsegno.store.memory import MemoryStore
from dalsegno.types import LoadFailure
from tests.connector.engines import VOCABULARY, StoreEngine, Unclosable
from tests.connector.unruly import UnrulyWorker

__all__ = [
    "HITS",
    "NULL",
    "PROMPTS",
    "START",
    "Gossip",
    "Hooked",
    "Keeper",
    "MultiEngine",
    "Unruly",
    "contents",
    "filled",
    "of_ranks",
    "received",
    "store_child",
]

NULL: Mapping[str, Any] = {"kv_connector": "NullConnector"}

START = ("bind_block_pool", "on_progress", "register_kv_caches")
"""Calls made before the first step."""


def store_child(store: Store, **extra: Any) -> dict[str, Any]:
    """A store connector over a store that outlives the engine."""
    settings = {"store": Unclosable(store), "store_block_size": 64, **extra}
    return {"kv_connector": "StoreConnector", "kv_connector_extra_config": settings}


def contents(store: MemoryStore) -> dict[Any, bytes]:
    """Every key of the store with its bytes."""
    return {key: entry.payload for key, entry in store._entries.items()}


class MultiEngine(StoreEngine):
    """An engine with a MultiConnector of these children."""

    def __init__(self, *children: Mapping[str, Any], **options: Any) -> None:
        self.children = children
        super().__init__(MemoryStore(), **options)

    def connect(self, role: str, settings: Mapping[str, Any]) -> Sides:
        given = {"kv_connector": "MultiConnector", "kv_role": role}
        config = {**given, "kv_connector_extra_config": {"connectors": list(self.children)}}
        scheduler, workers = create_connector(KVTransferConfig.parse(config), self.context)
        assert isinstance(scheduler, MultiScheduler)
        self.multi = scheduler
        return scheduler, workers

    def settle(self) -> None:
        """Also nothing may be left that a request or a load has brought about, or pinned."""
        super().settle()
        assert not self.core.manager.pins.counts
        assert all(not pins.counts for pins in self.multi._pins)
        completions = self.multi._completions
        assert not any([self.multi._chosen, self.multi._refused, completions._loads, completions._needed])


@dataclass
class Unruly:
    """A store connector whose reports come as `ranks` say.

    Attributes:
        store: what it stores in.
        extra: its settings.
        ranks: the worker sides, once it was made.
    """

    store: Store
    extra: Mapping[str, Any] = field(default_factory=dict)
    ranks: list[UnrulyWorker] = field(default_factory=list)

    def child(self) -> dict[str, Any]:
        return _by_path("make_it", self)

    def create(self, config: KVTransferConfig, context: ConnectorContext) -> Sides:
        scheduler, workers = create_connector(KVTransferConfig.parse(store_child(self.store, **self.extra)), context)
        self.ranks += [UnrulyWorker(worker) for worker in workers]
        return scheduler, self.ranks


@dataclass
class Hooked:
    """Any connector, with `hook` called before each of its calls: with the side's rank or None, and the call's name.

    Attributes:
        inner: the connector's config.
        hook: may raise, and then the connector is not called.
        calls: (rank, name) of every call.
    """

    inner: Mapping[str, Any]
    hook: Callable[[int | None, str], None] = lambda rank, name: None
    calls: list[tuple[int | None, str]] = field(default_factory=list)

    def child(self) -> dict[str, Any]:
        return _by_path("make_it", self)

    def create(self, config: KVTransferConfig, context: ConnectorContext) -> Sides:
        inner = KVTransferConfig.parse({"kv_role": config.kv_role, **self.inner})
        scheduler, workers = create_connector(inner, context)
        wrapped = [_wrapped(WorkerConnector, worker, self._called(rank)) for rank, worker in enumerate(workers)]
        return _wrapped(SchedulerConnector, scheduler, self._called(None)), wrapped

    def _called(self, rank: int | None) -> Callable[[str], None]:
        def called(name: str) -> None:
            self.calls.append((rank, name))
            self.hook(rank, name)

        return called


def _wrapped(base: type, inner: Any, called: Callable[[str], None]) -> Any:
    """An object of class `base` that passes all calls on."""

    def passes_on(name: str) -> Callable[..., Any]:
        def call(_: Any, *args: Any) -> Any:
            called(name)
            return getattr(inner, name)(*args)

        call.__name__ = name
        return call

    names = [name for name, value in vars(base).items() if callable(value) and not name.startswith("_")]
    return type(f"Hooked{base.__name__}", (base,), {name: passes_on(name) for name in names})()


@dataclass
class Keeper:
    """Saves nothing, and asks that tables are kept.

    Attributes:
        call: which of the two calls asks.
        wants: of which requests.
        sent: by rank, the requests it reports in the next poll.
    """

    call: str = "register_finished_partial_tail"
    wants: Callable[[Request], bool] = lambda request: True
    sent: dict[int, list[str]] = field(default_factory=dict)

    def child(self) -> dict[str, Any]:
        return _by_path("make_it", self)

    def create(self, config: KVTransferConfig, context: ConnectorContext) -> Sides:
        self.sent = {rank: [] for rank in context.ranks}
        return _KeeperScheduler(self), [_KeeperWorker(self, rank) for rank in context.ranks]


class _KeeperScheduler(SchedulerConnector):
    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper

    def register_finished_partial_tail(self, request: Request, block_ids: Any, offloads: Any) -> bool:
        super().register_finished_partial_tail(request, block_ids, offloads)
        return self.keeper.call == "register_finished_partial_tail" and self.keeper.wants(request)

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.keeper.call == "request_finished" and self.keeper.wants(request), None


class _KeeperWorker(WorkerConnector):
    def __init__(self, keeper: Keeper, rank: int) -> None:
        self.keeper, self.rank = keeper, rank

    def get_finished(self) -> tuple[set[str], set[int], list[LoadFailure]]:
        sent, self.keeper.sent[self.rank] = self.keeper.sent[self.rank], []
        return set(sent), set(), []


@dataclass
class Gossip:
    """Stores and loads nothing, and reports every load and every request, as done or as failed, at every poll."""

    failed: bool = False

    def child(self) -> dict[str, Any]:
        return _by_path("make_it", self)

    def create(self, config: KVTransferConfig, context: ConnectorContext) -> Sides:
        return SchedulerConnector(), [_GossipWorker(self.failed) for _ in context.ranks]


class _GossipWorker(WorkerConnector):
    def __init__(self, failed: bool) -> None:
        self.failed = failed

    def get_finished(self) -> tuple[set[str], set[int], list[LoadFailure]]:
        loads = range(50)
        failures = [LoadFailure(load, group, 0, 1000) for load in loads for group in range(2) if self.failed]
        return {f"r{number}" for number in range(50)}, set(loads), failures


def _by_path(name: str, what: object) -> dict[str, Any]:
    return {"kv_connector": name, "kv_connector_module_path": __name__, "kv_connector_extra_config": {"it": what}}


def make_it(config: KVTransferConfig, context: ConnectorContext) -> Sides:
    """What a child config made by `child` names: its object makes the sides."""
    made: Sides = config.kv_connector_extra_config["it"].create(config, context)
    return made


def received(engine: MultiEngine) -> list[tuple[int, int]]:
    """A list that will have (load, rank) of every report of a load that reaches the engine."""
    found: list[tuple[int, int]] = []
    loads = engine.core.connection.loads
    take = loads.take

    def noted(output: Any) -> Any:
        found.extend((load_id, output.rank) for load_id in output.received)
        return take(output)

    setattr(loads, "take", noted)  # noqa: B010
    return found


def of_ranks(reports: Sequence[tuple[int, int]], world_size: int) -> bool:
    """Whether every load that was reported was so exactly once by each rank."""
    loads = {load_id for load_id, _ in reports}
    return sorted(reports) == [(load_id, rank) for load_id in sorted(loads) for rank in range(world_size)]


PROMPTS = [random.Random(seed).choices(range(VOCABULARY), k=length) for seed, length in enumerate((40, 100, 257))]
HITS = [32, 96, 256]


def filled(world_size: int = 1) -> MemoryStore:
    store = MemoryStore()
    with StoreEngine(store, world_size=world_size) as engine:
        for prompt in PROMPTS:
            engine.send(prompt, 5)
        engine.settle()
    return store
