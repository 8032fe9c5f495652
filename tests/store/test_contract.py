"""Every store and every wrapper passes the contract suite."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dalsegno.store.base import Store
from dalsegno.store.embedded import EmbeddedStore
from dalsegno.store.memory import MemoryStore
from dalsegno.store.registry import open_store
from dalsegno.store.wrappers.counting import CountingStore
from dalsegno.store.wrappers.faulty import FaultyStore
from dalsegno.store.wrappers.latency import LatencyStore
from dalsegno.testing.store_contract import ROOM_BYTES, StoreContract

MAKERS: dict[str, Callable[[Path], Store]] = {
    "memory": lambda _: MemoryStore(),
    "bounded memory": lambda _: MemoryStore(ROOM_BYTES),
    "embedded": lambda path: EmbeddedStore(path / "store", ROOM_BYTES),
    "by settings": lambda path: open_store({"store": "embedded", "path": str(path / "s"), "bytes": ROOM_BYTES}),
    "counting": lambda path: CountingStore(EmbeddedStore(path / "store", ROOM_BYTES)),
    "faulty without faults": lambda _: FaultyStore(MemoryStore()),
    "latency": lambda _: LatencyStore(MemoryStore(), 1e-5),
    "wrappers in wrappers": lambda _: CountingStore(LatencyStore(FaultyStore(MemoryStore()))),
}


@pytest.mark.parametrize("maker", list(MAKERS.values()), ids=list(MAKERS))
class TestStores(StoreContract):
    @pytest.fixture
    def store(self, maker: Callable[[Path], Store], tmp_path: Path) -> Iterator[Store]:
        store = maker(tmp_path)
        yield store
        store.close()
