"""What connectors pin leaves room for the largest request."""

import logging

import pytest

from dalsegno.store.memory import MemoryStore
from tests.connector.engines import StoreEngine


def slabs_alone(max_model_len: int) -> int:
    with StoreEngine(MemoryStore()) as engine:
        return engine.core.manager.slabs_alone(max_model_len)


def test_an_engine_that_can_store_nothing_says_so_and_serves(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    with (
        caplog.at_level(logging.WARNING),
        StoreEngine(store, num_slabs=slabs_alone(300) + 1, max_model_len=300) as engine,
    ):
        assert "nothing will be stored or loaded" in caplog.text
        engine.send(range(200), 50)
        engine.send(range(200), 50)
        engine.settle()
        assert engine.core.stats()["kv_offload_jobs_dropped"] > 0
    assert not store.stats()["objects"]


def test_room_beside_the_largest_request_is_used_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    with (
        caplog.at_level(logging.WARNING),
        StoreEngine(store, "s", num_slabs=slabs_alone(300) + 30, max_model_len=300) as engine,
    ):
        engine.send(range(200), 50)
        engine.settle()
    assert not caplog.text
    assert store.stats()["objects"]
