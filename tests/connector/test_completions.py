"""Reports of loads and store jobs may come late, never, twice, in any order: answers are cold, blocks freed once."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from dalsegno.config import CacheConfig, SchedulerConfig
from dalsegno.connector.base import SchedulerConnector
from dalsegno.connector.store.messages import JobReport
from dalsegno.engine.core import EngineCore
from dalsegno.request import Request, RequestStatus
from dalsegno.sched.connection import ConnectorSetup
from dalsegno.store.memory import MemoryStore
from dalsegno.testing.builders import make_layout, make_request
from dalsegno.testing.fake_worker import FakeWorker
from dalsegno.types import LoadFailure
from tests.connector.engines import VOCABULARY, StoreEngine

PROMPT = random.Random(1).choices(range(VOCABULARY), k=100)
OTHER = random.Random(2).choices(range(VOCABULARY), k=100)


def stored(*prompts: list[int], kinds: str = "as") -> MemoryStore:
    """A store that has prefixes of these prompts."""
    store = MemoryStore()
    with StoreEngine(store, kinds) as engine:
        for prompt in prompts:
            engine.send(prompt)
        engine.settle()
    return store


def loading(engine: StoreEngine, request_id: str, prompt: list[int] = PROMPT) -> Request:
    """A request whose load is under way and will not be reported."""
    engine.reports.holds_all = True
    request = make_request(request_id, prompt, 5)
    engine.core.add_request(request)
    for _ in range(20):
        engine.core.step()
        if request.status is RequestStatus.LOADING:
            return request
    raise AssertionError("no load")


def num_pins(engine: StoreEngine) -> int:
    return sum(engine.core.manager.pins.counts.values())


@pytest.mark.parametrize("kinds", ["as", "a", "aws", "s"])
def test_a_load_that_never_returns_is_left_behind_and_keeps_its_blocks_until_it_does(kinds: str) -> None:
    store = stored(PROMPT, kinds=kinds)
    with StoreEngine(store, kinds, role="kv_consumer", save_decode_cache=False, setup={"load_timeout_s": 5}) as engine:
        engine.reports.holds_all = True
        request = engine.send(PROMPT, 20)
        assert request.num_cached_tokens == 0
        assert request.hit_report.lost["load_failed"] == 96
        assert engine.core.stats()["kv_load_timeouts"] == 1
        assert num_pins(engine) > 0
        engine.send(OTHER, 20)
        assert num_pins(engine) > 0
        engine.reports.holds_all = False
        engine.settle()
        assert num_pins(engine) == 0


def test_a_store_that_hangs_costs_one_timeout_and_not_one_per_request() -> None:
    prompts = [random.Random(seed).choices(range(VOCABULARY), k=60) for seed in range(8)]
    with StoreEngine(stored(*prompts), setup={"load_timeout_s": 1000}) as engine:
        engine.reports.holds_all = True
        for prompt in prompts[:6]:
            last = engine.send(prompt, 3)
        assert last.hit_report.lost == {"store_error": 48, "sub_unit": 12}
        stats = engine.core.stats()
        assert (stats["kv_load_timeouts"], stats["kv_load_lookups_skipped"]) == (1, 5)
        # As soon as it reports, or after as long again, loads are tried again.
        engine.clock.time += 1000
        engine.send(prompts[6], 3)
        assert engine.core.stats()["kv_load_timeouts"] == 2
        engine.reports.holds_all = False
        engine.settle()
        assert engine.send(prompts[7], 3).num_cached_tokens == 48


@pytest.mark.parametrize("reuses", [False, True])
@pytest.mark.parametrize("order", [1, -1])
def test_a_load_that_ends_after_its_request_was_aborted_publishes_nothing(reuses: bool, order: int) -> None:
    """48: also when another request has the id by then, and loads itself."""
    with StoreEngine(stored(PROMPT, OTHER)) as engine:
        loading(engine, "x")
        engine.core.abort("x")
        engine.core.step()
        assert num_pins(engine) > 0
        again = loading(engine, "x", OTHER) if reuses else None
        while len(engine.reports.loads) < 1 + reuses:
            engine.reports.collect()
        engine.reports.loads[:] = engine.reports.loads[::order]
        first = next(number for number, load in enumerate(engine.reports.loads) if load[0] == 0)
        assert first == (0 if order == 1 or not reuses else 1)
        engine.reports.holds_all = False
        engine.run()
        if again is not None:
            assert again.output_token_ids == engine.expected(OTHER, 5)
            assert again.num_cached_tokens == 96
        engine.settle()
        assert not is_published(engine, PROMPT)


def is_published(engine: StoreEngine, prompt: list[int]) -> bool:
    request = engine.request(prompt)
    manager = engine.core.manager
    manager.start_request(request)
    computed, boundary, _ = manager.get_computed_blocks(request)
    return boundary > 0 or any(computed.boundary_by_group.values())


@pytest.mark.parametrize("external", [False, True])
def test_a_load_that_ends_after_a_reset_publishes_nothing(external: bool) -> None:
    """80, R6: what was under way at a reset does not come back, and what was cleared is not known to be stored."""
    with StoreEngine(stored(PROMPT)) as engine:
        request = loading(engine, "x")
        assert not engine.core.reset_prefix_cache(reset_external=external)
        assert engine.core.reset_prefix_cache(reset_running_requests=True, reset_external=external)
        engine.core.abort("x")
        engine.core.step()
        engine.reports.holds_all = False
        engine.settle()
        assert len(engine.core.manager.index) == 0
        again = engine.send(PROMPT, 5)
        assert again.num_cached_tokens == (0 if external else 96)
        assert request.num_output_tokens == 0
        engine.settle()
        assert engine.core.reset_prefix_cache()
        assert engine.send(PROMPT, 5).num_cached_tokens == 96


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_reports_twice_in_any_order_and_of_unknown_ids_change_nothing_else(order: tuple[int, ...]) -> None:
    """48, 50, 61: two store jobs and a load are open; each is reported three times, beside ids nobody gave."""
    with StoreEngine(stored(PROMPT)) as engine:
        engine.reports.holds_all = True
        for prompt in (OTHER[:40], OTHER[1:80]):
            engine.send(prompt, 3)
        request = loading(engine, "x")
        while len(engine.reports.jobs) < 2 or not engine.reports.loads:
            engine.reports.collect()
        jobs, loads = engine.reports.jobs[:], engine.reports.loads[:]
        engine.reports.jobs[:], engine.reports.loads[:] = [], []
        engine.reports.holds_all = False
        for turn in (*order, *order, *reversed(order)):
            before = num_pins(engine)
            if turn < 2:
                engine.reports.jobs += [*jobs[turn::2], JobReport(9_999, (), True)]
            else:
                engine.reports.loads += [loads[0], (9_999, (LoadFailure(9_999, 0, 0, 64),))]
            engine.core.step()
            assert num_pins(engine) <= before or engine.core.stats()["kv_offload_pending_jobs"]
        engine.run()
        assert request.output_token_ids == engine.expected(PROMPT, 5)
        assert request.num_cached_tokens == 96
        engine.settle()


@pytest.mark.parametrize("reported", [True, False])
def test_an_answer_that_names_what_is_stored_waits_for_it_but_not_for_ever(reported: bool) -> None:
    with StoreEngine(MemoryStore(), setup={"job_timeout_s": 30}) as engine:
        engine.reports.holds_all = True
        request = engine.request(PROMPT, 3, kv_transfer_params={"do_remote_decode": True})
        engine.core.add_request(request)
        updates = []
        while request.finish_reason is None:
            updates += engine.core.step()
        ended = engine.clock.now()
        assert not any(update.finished for update in updates)
        engine.reports.holds_all = not reported
        updates = engine.run()
        assert [update.request for update in updates if update.finished] == [request]
        waited = engine.clock.now() - ended
        assert waited < 30 if reported else 30 <= waited <= 32
        answer = request.kv_transfer_answer
        assert answer is not None
        assert answer["stored_boundary"] == (96 if reported else 0)
        engine.reports.holds_all = False
        engine.settle()


@pytest.mark.parametrize("extra", [0, 1, 2, 3, 6, 20])
@pytest.mark.parametrize("kinds", ["as", "a", "aws", "s"])
def test_while_no_job_ever_ends_the_largest_request_still_runs(kinds: str, extra: int) -> None:
    """R6, R9: what jobs hold is bounded in slabs; what is dropped is counted."""
    longest = 300
    with StoreEngine(MemoryStore(), kinds, max_model_len=longest, budget=64) as probe:
        need = probe.core.manager.slabs_alone(longest) + 1
    with StoreEngine(MemoryStore(), kinds, max_model_len=longest, num_slabs=need + extra, budget=64) as engine:
        engine.reports.holds_all = True
        for seed in range(12):
            engine.send(random.Random(seed).choices(range(VOCABULARY), k=30 + 20 * seed), 20)
            assert engine.core.manager.pins.num_slabs <= extra
        engine.send(PROMPT * 2 + OTHER[:50], longest - 250)
        stats = engine.core.stats()
        assert stats["kv_offload_jobs_dropped"] > 0
        assert stats["kv_offload_pending_jobs"] == stats["kv_offload_jobs"]
        engine.reports.holds_all = False
        engine.settle()


def test_jobs_hold_no_more_bytes_than_they_may() -> None:
    with StoreEngine(MemoryStore(), max_store_backlog_bytes=20_000) as engine:
        engine.reports.holds_all = True
        for seed in range(10):
            engine.send(random.Random(seed).choices(range(VOCABULARY), k=150), 5)
            assert engine.core.stats()["kv_offload_backlog_bytes"] <= 20_000
        assert engine.core.stats()["kv_offload_jobs"] > 0
        assert engine.core.stats()["kv_offload_jobs_dropped"] > 0
        engine.reports.holds_all = False
        engine.settle()
        assert engine.core.stats()["kv_offload_backlog_bytes"] == 0


@pytest.mark.parametrize("no_store", [False, True])
def test_an_answer_is_not_waited_for_any_more_when_its_jobs_are_reported(no_store: bool) -> None:
    """Nor while the store is still to be asked, for one that stores nothing itself, what another request has stored."""
    with StoreEngine(MemoryStore()) as engine:
        engine.core.add_request(engine.request(PROMPT))
        port, connector = engine.worker.port, engine.core.connection.connector
        request = engine.request(PROMPT, 1, no_store=no_store, kv_transfer_params={"do_remote_decode": True})
        waits = []
        wait = port.wait

        def watched(timeout_s: float) -> bool:
            waits.append(connector.is_answer_held(request) and not connector.has_pending_push_work())
            return wait(timeout_s)

        setattr(port, "wait", watched)  # noqa: B010
        engine.core.add_request(request)
        engine.run()
        assert all(waits), "it was waited for an answer that could go"


class Talkative(SchedulerConnector):
    """Stores nothing, and says so when the request ends."""

    def request_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, {"remote_host": "there"}


@pytest.mark.parametrize(
    ("connector", "told"), [(SchedulerConnector(), {"stored_boundary": 0}), (Talkative(), {"remote_host": "there"})]
)
def test_who_asks_what_is_stored_is_told_whatever_the_connector_knows(
    connector: SchedulerConnector, told: dict[str, Any]
) -> None:
    """Also that nothing is, where nobody stores; what `request_finished` says is not lost."""
    config = CacheConfig(32, 16, decode_checkpoint_interval=16)
    layout = make_layout("as", config, num_slabs=50)
    worker = FakeWorker(layout)
    limits = SchedulerConfig(max_model_len=200, max_num_batched_tokens=200)
    core = EngineCore(worker, worker.clock, layout, config, limits, debug=True, connector=ConnectorSetup(connector))
    request = make_request("r", PROMPT, 2, kv_transfer_params={"do_remote_decode": True})
    core.add_request(request)
    while core.has_unfinished_requests:
        core.step()
    assert request.kv_transfer_answer == told
