"""The random runs of `store_workload` with a MultiConnector: the run's store, one of the engine's own, and others."""

import random
from typing import Any

from dalsegno.connector.config import KVTransferConfig
from dalsegno.connector.multi.scheduler import MultiScheduler
from dalsegno.connector.registry import ConnectorContext, Sides, create_connector
from dalsegno.store.base import Store
from dalsegno.store.memory import MemoryStore
from dalsegno.testing.auditing_store import AuditingStore, CellAuditor
from tests.connector.children import NULL, Gossip, Hooked
from tests.connector.store_workload import Engine, Shape, StoreRun

__all__ = ["MultiRun"]


class _UnrulyStore(Hooked):
    """A store connector of the engine's."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(NULL)
        self.engine = engine
        self.settings: dict[str, Any] = {}

    def create(self, config: KVTransferConfig, context: ConnectorContext) -> Sides:
        return self.engine.store_sides(KVTransferConfig("StoreConnector", config.kv_role, self.settings))


class _Engine(Engine):
    """Its children come in any order.

    Attributes:
        near: the engine's own store.
    """

    def __init__(self, shape: Shape, rng: random.Random, store: Store) -> None:
        inner = MemoryStore(rng.choice([None, 3_000]))
        layout = shape.layout(64, "one")
        self.near = AuditingStore(inner, layout, shape.unit, shape.object_tokens, CellAuditor(shape.masks()))
        super().__init__(shape, rng, store)

    def connect(self, role: str, settings: dict[str, Any]) -> Sides:
        stores = [_UnrulyStore(self), _UnrulyStore(self)]
        stores[0].settings = settings
        stores[1].settings = self.settings(self.near)
        children = [NULL, Gossip().child(), Gossip(failed=True).child()]
        children = [*(store.child() for store in stores), *self.rng.sample(children, self.rng.randrange(3))]
        self.rng.shuffle(children)
        given = KVTransferConfig("MultiConnector", role, {"connectors": children})
        scheduler, workers = create_connector(given, self.shape.context(self.layout, self.clock))
        assert isinstance(scheduler, MultiScheduler)
        self.multi = scheduler
        return scheduler, workers

    def settle(self) -> None:
        super().settle()
        completions = self.multi._completions
        left = [self.multi._chosen, self.multi._refused, completions._loads, completions._needed]
        assert not any([*left, *(pins.counts for pins in self.multi._pins)]), f"something is remembered: {left}"
        stats = self.multi.stats()
        assert stats["kv_connector_errors"] == 0


class MultiRun(StoreRun):
    """See `StoreRun`."""

    engine_class = _Engine

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.near = []
        for engine in self.engines:
            assert isinstance(engine, _Engine)
            engine.near.book = self.audit.book
            self.near.append(engine.near)

    def check_finished(self) -> None:
        super().check_finished()
        for near in self.near:
            near.check()
