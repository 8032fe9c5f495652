"""Every connector passes the contract suite."""

from typing import Any

import pytest

from dalsegno.connector.base import SchedulerConnector, WorkerConnector
from dalsegno.connector.config import KVTransferConfig
from dalsegno.connector.registry import ConnectorContext, Sides, create_connector
from dalsegno.store.memory import MemoryStore
from dalsegno.testing.connector_contract import ConnectorContract


class TestBaseConnector(ConnectorContract):
    def make(self, context: ConnectorContext) -> Sides:
        return SchedulerConnector(), [WorkerConnector() for _ in context.ranks]


class TestNullConnector(ConnectorContract):
    def make(self, context: ConnectorContext) -> Sides:
        return create_connector(KVTransferConfig("NullConnector"), context)


@pytest.mark.parametrize(
    ("settings", "world_size", "put_step"),
    [
        ({}, 1, {}),
        ({"lookup_async": True}, 1, {}),
        ({"load_async": False}, 1, {}),
        ({}, 2, {0: 2}),
        ({"lookup_async": True}, 4, {0: 4, 1: 2}),
    ],
    ids=str,
)
class TestStoreConnector(ConnectorContract):
    finds_again = True

    @pytest.fixture(autouse=True)
    def _settings(self, settings: dict[str, Any], world_size: int, put_step: dict[int, int]) -> None:
        self.settings = settings
        self.world_size = world_size
        self.put_step = put_step

    def make(self, context: ConnectorContext) -> Sides:
        extra = {"store": MemoryStore(1 << 30), "store_block_size": 64, **self.settings}
        return create_connector(KVTransferConfig("StoreConnector", kv_connector_extra_config=extra), context)


ASYNC = {"lookup_async": True}


@pytest.mark.parametrize(
    ("children", "world_size", "put_step"),
    [
        (["Null"], 1, {}),
        (["Null", {}], 1, {}),
        ([{}, "Null"], 1, {}),
        ([{}, {}], 1, {}),
        ([ASYNC, ASYNC], 1, {}),
        ([{}, {"load_async": False, "lookup_async": True}], 1, {}),
        (["Null", {}], 2, {}),
        ([{}, ASYNC], 2, {0: 2}),
        ([["Null", {}], {}], 2, {}),
        ([ASYNC, {}, ASYNC], 4, {0: 4, 1: 2}),
    ],
    ids=str,
)
class TestMultiConnector(ConnectorContract):
    """Children are settings of a store connector, or a list of children of their own."""

    @pytest.fixture(autouse=True)
    def _settings(self, children: list[Any], world_size: int, put_step: dict[int, int]) -> None:
        self.children = children
        self.world_size = world_size
        self.put_step = put_step
        self.finds_again = children != ["Null"]

    def make(self, context: ConnectorContext) -> Sides:
        return create_connector(KVTransferConfig.parse(self.child(self.children)), context)

    def child(self, given: Any) -> dict[str, Any]:
        if given == "Null":
            return {"kv_connector": "NullConnector"}
        if isinstance(given, list):
            extra: dict[str, Any] = {"connectors": [self.child(child) for child in given]}
            return {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}
        extra = {"store": MemoryStore(1 << 30), "store_block_size": 64, **given}
        return {"kv_connector": "StoreConnector", "kv_connector_extra_config": extra}
