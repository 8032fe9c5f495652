"""Every connector passes the contract suite."""

from typing import Any

import pytest

from dalsegno.connector.base import SchedulerConnector, WorkerConnector
from dalsegno.connector.config import KVTransferConfig
from dalsegno.connector.registry import ConnectorContext, create_connector
from dalsegno.store.memory import MemoryStore
from dalsegno.testing.connector_contract import ConnectorContract


class TestBaseConnector(ConnectorContract):
    def make(self, context: ConnectorContext) -> tuple[SchedulerConnector, WorkerConnector]:
        return SchedulerConnector(), WorkerConnector()


class TestNullConnector(ConnectorContract):
    def make(self, context: ConnectorContext) -> tuple[SchedulerConnector, WorkerConnector]:
        return create_connector(KVTransferConfig("NullConnector"), context)


@pytest.mark.parametrize("settings", [{}, {"lookup_async": True}, {"load_async": False}], ids=str)
class TestStoreConnector(ConnectorContract):
    finds_again = True

    @pytest.fixture(autouse=True)
    def _settings(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def make(self, context: ConnectorContext) -> tuple[SchedulerConnector, WorkerConnector]:
        extra = {"store": MemoryStore(1 << 30), "store_block_size": 64, **self.settings}
        return create_connector(KVTransferConfig("StoreConnector", kv_connector_extra_config=extra), context)
