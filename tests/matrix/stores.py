"""Stores and ranks that the switch matrix knows by name, and the connector over them."""

from collections.abc import Callable, Sequence
from pathlib import Path

from dalsegno.config import CacheConfig
from dalsegno.connector.base import WorkerConnector
from dalsegno.connector.config import KVTransferConfig
from dalsegno.connector.registry import ConnectorContext, create_connector
from dalsegno.connector.store.keys import KeyMaker
from dalsegno.kv.layout import MemoryLayout
from dalsegno.sched.connection import ConnectorSetup
from dalsegno.store.base import Buffers, Status, Store
from dalsegno.store.keys import StoreKey
from dalsegno.store.memory import MemoryStore
from dalsegno.store.mooncake import MooncakeStore
from dalsegno.store.registry import open_store
from dalsegno.store.wrappers.faulty import Fault, FaultyStore
from dalsegno.store.wrappers.wrapped import WrappedStore
from dalsegno.testing.fake_mooncake import FakeMooncakeClient, FakeMooncakeMaster
from dalsegno.testing.faulty_mooncake import UnluckyMooncakeClient
from dalsegno.types import Clock
from tests.connector.unruly import UnrulyWorker

__all__ = ["PATIENCE_S", "RANKS", "STORES", "connect", "mooncake", "unlucky_mooncake"]

PATIENCE_S = 10_000.0
"""On the fake clock, which runs fast while threads are waited for."""

_SEGMENT_BYTES = 2**28


def mooncake() -> MooncakeStore:
    """A store on the fake Mooncake."""
    return MooncakeStore(FakeMooncakeClient(FakeMooncakeMaster(), _SEGMENT_BYTES))


def unlucky_mooncake(rate: float = 0.1, seed: int = 0) -> MooncakeStore:
    """A store on a fake Mooncake where things go wrong."""
    client = UnluckyMooncakeClient(FakeMooncakeMaster(), _SEGMENT_BYTES, rate, seed)
    return MooncakeStore(client, probe_interval_s=0.001)


STORES: dict[str, Callable[[Path], Store]] = {
    "memory": lambda _: MemoryStore(),
    "embedded": lambda folder: open_store({"path": str(folder), "bytes": 2**24}),
    "faulty": lambda _: FaultyStore(MemoryStore(), rates=dict.fromkeys(Fault, 0.1)),
    "mooncake": lambda _: mooncake(),
    "mooncake, faulty": lambda _: unlucky_mooncake(),
}

RANKS: dict[str, tuple[int, dict[int, int]]] = {
    "1": (1, {}),
    "2": (2, {0: 2}),
    "4": (4, {0: 2}),
    "2, keys missing": (2, {}),
    "4, keys missing": (4, {0: 4}),
    "2, one dead": (2, {}),
    "4, one dead": (4, {}),
}
"""How many there are, and how many neighbours share the bytes of a group."""


class _Holes(WrappedStore):
    """Some objects of some namespaces are never there."""

    def __init__(self, inner: Store, namespaces: Sequence[str]) -> None:
        super().__init__(inner)
        self._namespaces = namespaces

    def exists(self, keys: Sequence[StoreKey]) -> list[Status]:
        found = self.inner.exists(keys)
        return [Status.MISS if self._is_hole(key) else said for key, said in zip(keys, found, strict=True)]

    def get(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        found = self.inner.get(keys, buffers)
        return [Status.MISS if self._is_hole(key) else said for key, said in zip(keys, found, strict=True)]

    def _is_hole(self, key: StoreKey) -> bool:
        return key.namespace in self._namespaces and key.block_hash[0] % 3 == 0


def connect(
    store: str, ranks: str, layout: MemoryLayout, config: CacheConfig, clock: Clock, identity: str, folder: Path
) -> tuple[ConnectorSetup, Sequence[WorkerConnector]]:
    """Make the sides of a store connector; `store` and `ranks` are names of `STORES` and `RANKS`."""
    world_size, put_step = RANKS[ranks]
    context = ConnectorContext(layout, config, {"backend": identity}, clock, range(world_size), world_size, put_step)
    object_tokens = 2 * config.block_size
    opened = STORES[store](folder)
    if "missing" in ranks:
        opened = _Holes(opened, KeyMaker(context, world_size - 1, object_tokens, "").namespaces)
    settings = {"store": opened, "store_block_size": object_tokens}
    scheduler, workers = create_connector(KVTransferConfig("StoreConnector", "kv_both", settings), context)
    if "dead" not in ranks:
        return ConnectorSetup(scheduler, world_size, load_timeout_s=PATIENCE_S), workers
    silent = UnrulyWorker(workers[-1], holds_all=True)
    return ConnectorSetup(scheduler, world_size, close_timeout_s=0.1), [*workers[:-1], silent]
