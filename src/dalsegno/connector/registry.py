"""Connectors by name, loaded when they are asked for; third parties' by module path.

A connector is a function `create(config, context)` that returns its two sides. A third party's module has one under
the connector's name; a class with a class method `create` will do as well.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dalsegno.config import CacheConfig
from dalsegno.connector.base import SchedulerConnector, WorkerConnector
from dalsegno.connector.config import KVTransferConfig
from dalsegno.errors import OptionError
from dalsegno.kv.layout import MemoryLayout
from dalsegno.options import nearest_name
from dalsegno.types import Clock

__all__ = ["CONNECTORS", "ConnectorContext", "create_connector"]

CONNECTORS = {
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
        rank, world_size: which shard of the model the worker side holds, of how many.
    """

    layout: MemoryLayout
    cache_config: CacheConfig
    identity: Mapping[str, str]
    clock: Clock
    rank: int = 0
    world_size: int = 1


_Factory = Callable[[KVTransferConfig, ConnectorContext], tuple[SchedulerConnector, WorkerConnector]]


def create_connector(config: KVTransferConfig, context: ConnectorContext) -> tuple[SchedulerConnector, WorkerConnector]:
    """Make both sides of the configured connector.

    Raises:
        OptionError: there is no such connector or module, or it refuses its settings.
    """
    scheduler, worker = _factory(config)(config, context)
    if not isinstance(scheduler, SchedulerConnector) or not isinstance(worker, WorkerConnector):
        raise OptionError(
            f"kv_connector={config.kv_connector!r}: create must return a SchedulerConnector and a WorkerConnector, "
            f"got {type(scheduler).__name__} and {type(worker).__name__}"
        )
    return scheduler, worker


def _factory(config: KVTransferConfig) -> _Factory:
    name, path = config.kv_connector, config.kv_connector_module_path
    if path is None:
        if name not in CONNECTORS:
            nearest = nearest_name(name, CONNECTORS)
            hint = f"did you mean {nearest}?" if nearest else f"known are {', '.join(sorted(CONNECTORS))}"
            raise OptionError(
                f"there is no kv_connector {name!r}; {hint} (others: give their kv_connector_module_path)"
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
