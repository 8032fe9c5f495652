"""Roles and switches of the store connector, what an answer tells of the store, and counters that add up."""

import random
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from dalsegno.request import FinishReason, Request
from dalsegno.store.base import Buffers, Status
from dalsegno.store.keys import StoreKey
from dalsegno.store.memory import MemoryStore
from dalsegno.store.wrappers.faulty import Fault, FaultyStore
from dalsegno.store.wrappers.wrapped import WrappedStore
from tests.connector.engines import VOCABULARY, StoreEngine

REMOTE: Mapping[str, Any] = {"kv_transfer_params": {"do_remote_decode": True}}


def prompt_of(length: int, seed: object = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(VOCABULARY), k=length)


class Gate(WrappedStore):
    """A store whose puts, or questions, hang until they are let through."""

    def __init__(self, call: str) -> None:
        super().__init__(MemoryStore(1 << 30))
        self.call, self.open, self.entered = call, threading.Event(), threading.Event()

    def exists(self, keys: Sequence[StoreKey]) -> list[Status]:
        self._pass("exists")
        return self.inner.exists(keys)

    def put(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        self._pass("put")
        return self.inner.put(keys, buffers)

    def get(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        self._pass("get")
        return self.inner.get(keys, buffers)

    def _pass(self, call: str) -> None:
        if call == self.call:
            self.entered.set()
            assert self.open.wait(60), "nobody opened the gate"


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
@pytest.mark.parametrize("save", [None, True, False])
def test_what_is_saved_follows_from_role_and_save_decode_cache(role: str, save: bool | None) -> None:
    """36: prompts by producer and both, answers by choice, in role kv_both by default."""
    store = MemoryStore(1 << 30)
    with StoreEngine(store, role=role, save_decode_cache=save) as engine:
        turn = engine.send(prompt_of(70), 100)
        engine.settle()
    saves_prompt, saves_answer = role != "kv_consumer", role == "kv_both" if save is None else save
    with StoreEngine(store, role="kv_consumer") as engine:
        following = engine.send([*turn.token_ids.tolist(), 4, 5], 5)
    # An answer's boundary holds everything below it, so the prompt is in the store with it.
    assert following.num_cached_tokens == (160 if saves_answer else 64 if saves_prompt else 0)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_every_role_looks_up_unless_it_is_told_not_to(role: str) -> None:
    store, prompt = MemoryStore(1 << 30), prompt_of(100)
    with StoreEngine(store) as engine:
        engine.send(prompt)
        engine.settle()
    for enable, hit in ((True, 96), (False, 0)):
        with StoreEngine(store, role=role, enable_lookup=enable) as engine:
            sent = engine.send(prompt, 5)
            assert sent.num_cached_tokens == hit
            assert ("store_miss" in sent.hit_report.lost) is False
            assert engine.core.stats()["external_prefix_cache_queries"] == (100 if enable else 0)


def test_no_store_means_not_stored_but_found_and_cached_all_the_same() -> None:
    store, prompt = MemoryStore(1 << 30), prompt_of(100)
    with StoreEngine(store) as engine:
        engine.send(prompt, 40, no_store=True)
        engine.settle()
        assert store.stats()["objects"] == 0
        assert engine.send(prompt, 5, no_store=True).num_cached_tokens == 96
        assert engine.send(prompt, 5).num_cached_tokens == 96
        engine.settle()
    with StoreEngine(store) as engine:
        sent = engine.send(prompt, 5, no_store=True)
        assert sent.num_cached_tokens in (0, 96)
        engine.settle()


def test_cache_prefixes_are_spaces_of_their_own_on_one_store() -> None:
    store, prompt = MemoryStore(1 << 30), prompt_of(100)
    for hit in (0, 96):
        for prefix in ("", "a", "b"):
            with StoreEngine(store, cache_prefix=prefix) as engine:
                assert engine.send(prompt, 5).num_cached_tokens == hit
                engine.settle()


def test_a_load_that_is_not_async_lets_nothing_run_beside_it() -> None:
    store, prompt = MemoryStore(1 << 30), prompt_of(300)
    with StoreEngine(store) as engine:
        engine.send(prompt)
        engine.settle()
    with StoreEngine(store, load_async=False) as engine:
        other, loader = engine.request(prompt_of(40, 1), 50), engine.request(prompt, 5)
        engine.core.add_request(other)
        engine.core.step()
        engine.core.add_request(loader)
        engine.run()
        assert loader.num_cached_tokens == 288
        assert other.output_token_ids == engine.expected(prompt_of(40, 1), 50)
        engine.settle()


# Answers that tell what is stored.


def finish_with_updates(engine: StoreEngine, *requests: Request) -> list[Request]:
    for request in requests:
        engine.core.add_request(request)
    return [update.request for update in engine.run() if update.finished]


@pytest.mark.parametrize("max_tokens", [1, 40])
def test_an_answer_that_is_to_tell_what_is_stored_waits_until_it_is(max_tokens: int) -> None:
    """33"""
    gate = Gate("put")
    with StoreEngine(gate, role="kv_producer") as engine:
        request = engine.request(prompt_of(100), max_tokens, **REMOTE)
        engine.core.add_request(request)
        for _ in range(max_tokens + 5):
            assert not any(update.finished for update in engine.core.step())
        assert engine.core.has_unfinished_requests
        gate.open.set()
        assert [update.request for update in engine.run() if update.finished] == [request]
        assert request.kv_transfer_answer == {"do_remote_prefill": True, "stored_boundary": 96}
        engine.settle()
    with StoreEngine(gate.inner, role="kv_consumer") as engine:
        assert engine.send([*prompt_of(100), 1]).num_cached_tokens == 96


def test_an_answer_waits_no_longer_than_the_job_timeout_and_names_what_is_stored_then() -> None:
    gate = Gate("put")
    engine = StoreEngine(gate, setup={"job_timeout_s": 5.0})
    [done] = finish_with_updates(engine, engine.request(prompt_of(100), 1, **REMOTE))
    assert engine.clock.time >= 5.0
    assert done.kv_transfer_answer == {"do_remote_prefill": True, "stored_boundary": 0}
    gate.open.set()
    engine.settle()
    engine.close()


def test_other_answers_never_wait() -> None:
    gate = Gate("put")
    engine = StoreEngine(gate)
    plain = engine.request(prompt_of(100), 1, kv_transfer_params={"do_remote_decode": False})
    assert finish_with_updates(engine, plain) == [plain]
    assert engine.clock.time < 5.0
    gate.open.set()
    engine.settle()
    engine.close()


def test_an_abort_ends_an_answer_that_is_held() -> None:
    gate = Gate("put")
    engine = StoreEngine(gate)
    first = engine.request(prompt_of(100), 50, **REMOTE)
    engine.core.add_request(first)
    for _ in range(5):
        engine.core.step()
    engine.core.abort(first.request_id)
    gate.open.set()
    assert [update.request for update in engine.run() if update.finished] == [first]
    assert first.finish_reason is FinishReason.ABORT
    assert first.kv_transfer_answer is not None
    engine.settle()
    engine.close()


def test_what_is_stored_already_is_named_without_a_job() -> None:
    with StoreEngine(MemoryStore(1 << 30)) as engine:
        for _ in range(2):
            [done] = finish_with_updates(engine, engine.request(prompt_of(100), 1, **REMOTE))
            assert done.kv_transfer_answer == {"do_remote_prefill": True, "stored_boundary": 96}
        engine.settle()


def test_every_sample_of_a_prompt_is_answered_and_names_a_boundary() -> None:
    with StoreEngine(MemoryStore(1 << 30)) as engine:
        done = finish_with_updates(engine, engine.request(prompt_of(100), 20, n=3, **REMOTE))
        assert len(done) == 3
        assert [r.kv_transfer_answer["stored_boundary"] for r in done if r.kv_transfer_answer] == [112] * 3
        engine.settle()


# Failures, and a store that hangs.


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault.call == "get"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_failed_load_is_a_miss_or_the_requests_end_as_the_policy_says(fault: Fault, fails: bool) -> None:
    """50, 65, 72"""
    store, prompt = MemoryStore(1 << 30), prompt_of(300)
    with StoreEngine(store) as engine:
        engine.send(prompt)
        engine.settle()
    faulty = FaultyStore(store, rates={fault: 1.0})
    with StoreEngine(faulty, setup={"load_failure_ends_request": fails}) as engine:
        request = engine.request(prompt, 5)
        [done] = finish_with_updates(engine, request)
        assert faulty.injected[fault] > 0
        assert done.finish_reason is (FinishReason.ERROR if fails else FinishReason.LENGTH)
        if fails:
            assert "could not be loaded" in str(done.error)
        else:
            assert done.output_token_ids == engine.expected(prompt, 5)
            assert done.hit_report.lost["load_failed"] == 288
        engine.settle()


def test_while_a_lookup_hangs_later_ones_are_misses_at_once() -> None:
    gate = Gate("exists")
    engine = StoreEngine(gate, role="kv_consumer", lookup_async=True, lookup_timeout_s=3.0)
    engine.send(prompt_of(100), 5)
    assert gate.entered.is_set()
    assert engine.clock.time >= 3.0
    before = engine.clock.time
    engine.send(prompt_of(100, 1), 5)
    assert engine.clock.time - before <= 10.0
    gate.open.set()
    engine.settle()
    engine.close()


SCRIPT = """
from tests.connector.engines import StoreEngine
from tests.connector.test_switches import Gate, prompt_of
engine = StoreEngine(Gate("exists"), role="kv_consumer", lookup_async=True, lookup_timeout_s=3.0)
engine.send(prompt_of(100), 5)
print(engine.core.stats()["kv_offload_lookup_timeouts"])
engine.close()
"""


def test_a_lookup_that_hangs_for_ever_is_counted_and_keeps_no_process_from_ending() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1"]


# Counters.

MONOTONE = (
    "external_prefix_cache_",
    "kv_load",
    "kv_offload_store",
    "kv_offload_jobs",
    "prefix_cache_",
    "prompt_tokens",
)


@pytest.mark.parametrize("rate", [0.0, 0.15])
def test_counters_only_rise_and_are_the_sum_of_what_requests_report(rate: float) -> None:
    """56, I: over 200 mixed requests, with a store that fails now and then and one that does not."""
    rng = random.Random(7)
    store = FaultyStore(MemoryStore(1 << 30), rates=dict.fromkeys(Fault, rate), seed=3)
    requests: list[Request] = []
    last: dict[str, float] = {}
    openings = [prompt_of(rng.randrange(10, 200), seed) for seed in range(6)]
    # A step is a second of the engine's clock and much less of the store's: nothing is to be late for that.
    patient = {"load_timeout_s": 1e9}
    with StoreEngine(store, num_slabs=24, max_model_len=400, setup=patient) as engine:
        while len(requests) < 200:
            for _ in range(rng.randrange(1, 6)):
                prompt = [*rng.choice(openings), *prompt_of(rng.randrange(30), rng.randrange(9))]
                requests.append(engine.request(prompt, rng.randrange(1, 30), no_store=rng.random() < 0.1))
                engine.core.add_request(requests[-1])
            for _ in range(rng.randrange(1, 60)):
                engine.core.step()
                stats = engine.core.stats()
                for name in stats:
                    if name.startswith(MONOTONE):
                        assert stats[name] >= last.get(name, 0), name
                last = dict(stats)
            if rng.random() < 0.3:
                engine.run()
                engine.core.reset_prefix_cache()
        engine.run()
        engine.settle()
        stats = engine.core.stats()
    for request in requests:
        report = request.hit_report
        assert request.finish_reason is FinishReason.LENGTH
        assert report.boundary + sum(report.lost.values()) == request.num_prompt_tokens
        assert sum(report.cached_by_tier.values()) == report.boundary == request.num_cached_tokens
        assert report.cached_by_tier.keys() <= {"device", "store"}
        assert all(count > 0 for count in [*report.cached_by_tier.values(), *report.lost.values()])
    from_store = sum(request.hit_report.cached_by_tier.get("store", 0) for request in requests)
    assert from_store > 0
    assert stats["external_prefix_cache_hits"] == from_store
    assert stats["external_prefix_cache_queries"] == stats["prompt_tokens"]
    assert stats["prefix_cache_hits"] == sum(request.num_cached_tokens or 0 for request in requests)
    assert stats["kv_load_failures"] <= stats["kv_loads"]
    assert rate or not stats["kv_load_failures"]
