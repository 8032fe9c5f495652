"""Each call of a store may raise, hang, or answer nonsense: the key is a miss, nothing is pinned, requests go on."""

import logging
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from dalsegno.store.base import Buffers, Status
from dalsegno.store.keys import StoreKey
from dalsegno.store.memory import MemoryStore
from tests.connector.engines import VOCABULARY, StoreEngine
from tests.connector.store_workload import quiet_log

PROMPT = random.Random(1).choices(range(VOCABULARY), k=100)
SITES = ("lookup", "exists", "put", "get", "touch", "clear")
WAYS = ("raises", "short", "long", "none", "numbers", "error", "empty")


class OddStore(MemoryStore):
    """Misbehaves at one site, as long as `way` is set; a lookup is told from a sender's question by its thread."""

    def __init__(self, site: str) -> None:
        super().__init__()
        self.site = site
        self.way = ""
        self.count = 0
        self.opened = threading.Event()

    def exists(self, keys: Sequence[StoreKey]) -> list[Status]:
        sends = threading.current_thread().name.startswith("dalsegno-sender")
        return self._spoil("exists" if sends else "lookup", super().exists(keys))

    def put(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        if self.site == "put" and self.way in ("hangs", "raises"):
            return self._spoil("put", [])
        return self._spoil("put", super().put(keys, buffers))

    def get(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        statuses = super().get(keys, buffers)
        if self.site == "get" and self.way:
            for pieces in buffers:
                pieces[-1][-1:] = b"x"
        return self._spoil("get", statuses)

    def touch(self, keys: Sequence[StoreKey]) -> None:
        self._spoil("touch", [])
        super().touch(keys)

    def clear(self, namespace: str | None = None, salt: str | None = None) -> int:
        self._spoil("clear", [])
        return super().clear(namespace, salt)

    def _spoil(self, site: str, statuses: list[Status]) -> list[Status]:
        if site != self.site or not self.way:
            return statuses
        self.count += 1
        if self.way == "raises":
            raise ConnectionError("planted")
        if self.way == "hangs":
            self.opened.wait(30)
            return statuses
        odd: dict[str, Any] = {
            "short": statuses[:-1],
            "long": [*statuses, Status.OK],
            "none": [None] * len(statuses),
            "numbers": [-1] * len(statuses),
            "error": [Status.ERROR] * len(statuses),
            "empty": [],
        }
        spoilt: list[Status] = odd[self.way]
        return spoilt


def forget(engine: StoreEngine) -> None:
    assert engine.core.reset_prefix_cache()


@pytest.mark.parametrize("lookup_async", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("site", SITES)
def test_a_call_that_misbehaves_is_a_miss_and_leaves_nothing_behind(site: str, way: str, lookup_async: bool) -> None:
    """50, 72, R7"""
    store = OddStore(site)
    with quiet_log(), StoreEngine(store, lookup_async=lookup_async) as engine:
        if site in ("lookup", "get"):
            engine.send(PROMPT, 20)
            engine.settle()
            forget(engine)
        store.way = way
        odd = engine.send(PROMPT, 20)
        engine.settle()
        forget(engine)
        if site == "clear":
            assert engine.core.reset_prefix_cache(reset_external=True)
            engine.settle()
        second = engine.send(PROMPT, 20)
        engine.settle()
        assert store.count > 0
        hits = (odd.num_cached_tokens, second.num_cached_tokens)
        if site in ("lookup", "get") and way not in ("short", "long"):
            assert hits == (0, 0)
        # As soon as the store behaves, what is sent is found again.
        store.way = ""
        for _ in range(3):
            forget(engine)
            third = engine.send(PROMPT, 20)
            engine.settle()
        assert third.num_cached_tokens == 96


@pytest.mark.parametrize("num_clears", [1, 2])
def test_while_a_reset_could_not_empty_the_store_it_is_not_used(num_clears: int) -> None:
    """80: a refused or failed clearing must not bring back what was there before."""
    store = OddStore("clear")
    with quiet_log(), StoreEngine(store) as engine:
        engine.send(PROMPT)
        engine.settle()
        there = store.stats()["objects"]
        store.way = "raises"
        for _ in range(num_clears):
            assert engine.core.reset_prefix_cache(reset_external=True)
            engine.settle()
        for _ in range(2):
            assert engine.send(PROMPT).num_cached_tokens == 0
            engine.settle()
            forget(engine)
        assert store.stats()["objects"] == there
        assert engine.core.stats()["kv_offload_clear_failures"] >= 3
        # The next lookup has it emptied first, so that what is found afterwards was stored afterwards.
        store.way = ""
        assert engine.send(PROMPT).num_cached_tokens == 0
        engine.settle()
        forget(engine)
        assert engine.send(PROMPT).num_cached_tokens == 96
        engine.settle()


@pytest.mark.parametrize("site", ["lookup", "exists", "put", "get", "touch", "clear"])
def test_a_call_that_hangs_stops_no_request(site: str) -> None:
    """R7, R9: also in the smallest pool that can store at all; what hangs keeps its blocks until it has ended."""
    with StoreEngine(MemoryStore(), max_model_len=300) as probe:
        need = probe.core.manager.slabs_alone(300) + 1
    store = OddStore(site)
    setup = {"load_timeout_s": 5}
    with (
        quiet_log(),
        StoreEngine(store, max_model_len=300, num_slabs=need + 8, setup=setup, lookup_async=True) as engine,
    ):
        if site in ("lookup", "get"):
            engine.send(PROMPT, 20)
            engine.settle()
            forget(engine)
        store.way = "hangs"
        engine.send(PROMPT, 20)
        if site == "clear":
            engine.settle()
            assert engine.core.reset_prefix_cache(reset_external=True)
        for seed in range(6):
            prompt = random.Random(seed).choices(range(VOCABULARY), k=40 * seed + 30)
            engine.send(prompt, 20)
        assert store.count > 0
        store.way = ""
        store.opened.set()
        engine.settle()


def test_closing_beside_a_store_that_hangs_ends_and_says_what_it_drops(caplog: pytest.LogCaptureFixture) -> None:
    """The store is left to the thread that hangs in it: closing it there would pull it from under that thread."""
    store = OddStore("put")
    engine = StoreEngine(store, setup={"close_timeout_s": 3})
    store.way = "hangs"
    engine.send(PROMPT, 20)
    pending = engine.core.stats()["kv_offload_pending_jobs"]
    assert pending > 0
    with caplog.at_level(logging.WARNING):
        engine.close()
    assert f"'kv_offload_pending_jobs': {pending}" in caplog.text
    assert "it is not closed" in caplog.text
    store.opened.set()


def test_a_close_that_is_interrupted_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C while it waits for the store ends the wait, not the closing: nobody can close again."""
    engine = StoreEngine(MemoryStore(), world_size=2)
    engine.ranks[0].holds_all = True
    engine.send(PROMPT, 20)
    assert engine.core.stats()["kv_offload_pending_jobs"] > 0

    def interrupt(_timeout_s: float) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.worker.port, "wait", interrupt)
    threads = [side._thread for rank in engine.ranks for side in (rank.inner._sender, rank.inner._receiver)]  # type: ignore[attr-defined]
    assert all(thread.is_alive for thread in threads)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert not any(thread.is_alive for thread in threads)


def test_what_a_store_has_lost_is_stored_again() -> None:
    """68: a store evicts behind our back; once a lookup has missed it, it is not known to be stored any more."""
    store = MemoryStore()
    with StoreEngine(store) as engine:
        for _ in range(2):
            engine.send(PROMPT)
            engine.settle()
            store.clear()
            forget(engine)
        hits = []
        for _ in range(4):
            hits.append(engine.send(PROMPT).num_cached_tokens)
            engine.settle()
            forget(engine)
        assert hits[-1] == 96, hits


def test_one_bad_batch_of_reads_costs_no_more_than_the_batch() -> None:
    """R7: what was read and verified before is kept."""
    store = OddStore("get")
    prompt = random.Random(5).choices(range(VOCABULARY), k=32 * 30 + 1)
    with quiet_log(), StoreEngine(store, store_block_size=32) as engine:
        engine.send(prompt[:500], checkpoint_at=(256, 480))
        engine.send(prompt)
        engine.settle()
    calls = iter(range(100))
    original = store.get

    def get(keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        if next(calls) == 1:
            raise ConnectionError("planted")
        return original(keys, buffers)

    store.get = get  # type: ignore[method-assign]
    with quiet_log(), StoreEngine(store, store_block_size=32, save_decode_cache=False, role="kv_consumer") as engine:
        request = engine.send(prompt, 5)
        assert request.num_cached_tokens == 496, request.hit_report
        assert engine.core.stats()["kv_offload_load_objects"] == 17
        engine.settle()
