"""Connectors by name, loaded when they are asked for; third parties' by module path.

A connector is a function `create(config, context)` that returns its two sides: the scheduler's, and one worker side for
each rank of the context. A third party's module has one under the connector's name; a class with a class method
`create` will do as well.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dalsegno.config import CacheConfig
from dalsegno.connector.base import SchedulerConnector, WorkerConnector
from dalsegno.connector.config import KVTransferConfig
from dalsegno.errors import OptionError
from dalsegno.kv.layout import MemoryLayout
from dalsegno.types import Clock

__all__ = ["CONNECTORS", "ConnectorContext", "Sides", "create_connector"]

CONNECTORS = {
    "MooncakeStoreConnector": "dalsegno.connector.store.connector",
    "MultiConnector": "dalsegno.connector.multi.connector",
    "NullConnector": "dalsegno.connector.null",
    "StoreConnector": "dalsegno.connector.store.connector",
}
"""Module of each connector; its `create` makes both sides."""


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """What a connector may know of its engine.

    Attributes:
        layout: how device memory is cut.
        cache_config: block and hash unit sizes.
        identity: what says that two engines compute the same bytes: digests of weights and model config, dtypes.
        clock: the engine's.
        ranks: the shards of the model that are held in this process, each with a worker side of its own.
        world_size: of how many.
        put_step: by group, how many neighbouring ranks hold the same bytes of it; 1 where nothing is said.
    """

    layout: MemoryLayout
    cache_config: CacheConfig
    identity: Mapping[str, str]
    clock: Clock
    ranks: Sequence[int] = (0,)
    world_size: int = 1
    put_step: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that every rank exists, and that ranks with the same bytes come in whole neighbourhoods."""
        assert all(0 <= rank < self.world_size for rank in self.ranks), f"of {self.world_size} ranks: {self.ranks}"
        for group, step in self.put_step.items():
            assert step > 0 == self.world_size % step, f"group {group}: {self.world_size} ranks by {step}"


Sides = tuple[SchedulerConnector, Sequence[WorkerConnector]]
"""The scheduler's side of a connector, and a worker side for each rank of the context."""

_Factory = Callable[[KVTransferConfig, ConnectorContext], Sides]


def create_connector(config: KVTransferConfig, context: ConnectorContext) -> Sides:
    """Make both sides of the configured connector.

    Raises:
        OptionError: there is no such connector or module, or it refuses its settings.
    """
    scheduler, workers = _factory(config)(config, context)
    if not isinstance(scheduler, SchedulerConnector) or not _are_worker_sides(workers, len(context.ranks)):
        raise OptionError(
            f"kv_connector={config.kv_connector!r}: create must return a SchedulerConnector and a sequence of "
            f"{len(context.ranks)} WorkerConnector, got {type(scheduler).__name__} and {workers!r:.80}"
        )
    return scheduler, workers


def _are_worker_sides(given: object, count: int) -> bool:
    if not isinstance(given, Sequence) or len(given) != count:
        return False
    return all(isinstance(worker, WorkerConnector) for worker in given)


def _factory(config: KVTransferConfig) -> _Factory:
    name, path = config.kv_connector, config.kv_connector_module_path
    if path is None:
        if name not in CONNECTORS:
            raise OptionError(
                f"there is no kv_connector {name!r}; known are {', '.join(sorted(CONNECTORS))} "
                "(others: give their kv_connector_module_path)"
            )
        factory: _Factory = importlib.import_module(CONNECTORS[name]).create
        return factory
    try:
        module = importlib.import_module(path)
    except Exception as error:  # a foreign module may raise anything
        raise OptionError(f"kv_connector_module_path={path!r} cannot be imported: {error}") from error
    found = getattr(module, name, None)
    create = getattr(found, "create", found)
    if not callable(create):
        raise OptionError(f"module {path!r} has no connector {name!r}")
    made: _Factory = create
    return made
