"""What every connector must do, as tests: subclass `ConnectorContract`, say how one is made, and let pytest find it.

The real scheduler runs it, over a worker without a model whose answers show every wrong byte. After each test nothing
may be held: no pin, no pending job, no thread.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import pytest

from dalsegno.config import CacheConfig, SchedulerConfig
from dalsegno.connector.base import (
    BoundPool,
    ConnectorOutput,
    MatchStatus,
    SchedulerConnector,
    WorkerConnector,
    collect_output,
)
from dalsegno.connector.registry import ConnectorContext, Sides
from dalsegno.engine.core import EngineCore
from dalsegno.kv.hand_off import HandOff
from dalsegno.kv.manager import KVCacheManager
from dalsegno.request import FinishReason, Request
from dalsegno.sched.connection import ConnectorSetup
from dalsegno.testing.builders import make_layout, make_request
from dalsegno.testing.fake_worker import FakeClock, FakeWorker, expected_tokens
from dalsegno.types import LoadFailure, StepPlan

__all__ = ["ConnectorContract", "ContractEngine"]

_VOCABULARY = 997
_MOST_STEPS = 2000
# On the fake clock, which runs fast while threads are waited for.
_SETTLE_S = 10_000.0
_UNKNOWN = 987_654_321
_CONFIG = CacheConfig(32, 16, decode_checkpoint_interval=16)


class ContractEngine:
    """An engine core in debug mode around a connector; records what the worker side reports.

    Attributes:
        core: the engine; its counts are checked after every step.
        outputs: everything the worker side has reported.
        foreign_calls: pins given or taken on a thread that is not the engine's.
    """

    def __init__(self, contract: "ConnectorContract", num_slabs: int = 200) -> None:
        """Make an engine with a connector of the contract's."""
        self.layout = make_layout("aws", _CONFIG, num_slabs=num_slabs)
        self.clock = FakeClock()
        identity = {"weights": "w", "config": "c", "dtype": "int64"}
        ranks = range(contract.world_size)
        context = ConnectorContext(
            self.layout, _CONFIG, identity, self.clock, ranks, len(ranks), put_step=contract.put_step
        )
        scheduler, worker_sides = contract.make(context)
        self.worker = FakeWorker(
            self.layout, self.clock, vocab_size=_VOCABULARY, connectors=worker_sides, put_step=contract.put_step
        )
        limits = SchedulerConfig(max_model_len=1000, max_num_batched_tokens=100)
        self.core = EngineCore(
            self.worker,
            self.clock,
            self.layout,
            _CONFIG,
            limits,
            debug=True,
            connector=ConnectorSetup(
                scheduler, world_size=len(ranks), load_timeout_s=_SETTLE_S, close_timeout_s=_SETTLE_S
            ),
        )
        self.outputs: list[ConnectorOutput] = []
        self.foreign_calls: list[str] = []
        self._watch()

    def send(self, prompts: Sequence[Sequence[int]], max_tokens: int = 20, name: str = "r") -> list[Request]:
        """Serve prompts together, check every answer against a cold run, and wait for what is stored."""
        requests = [make_request(f"{name}{i}", prompt, max_tokens) for i, prompt in enumerate(prompts)]
        for request in requests:
            self.core.add_request(request)
        self.run()
        for request, prompt in zip(requests, prompts, strict=True):
            assert request.output_token_ids == expected_tokens(self.layout, prompt, max_tokens, _VOCABULARY)
        self.settle()
        return requests

    def run(self, num_steps: int = _MOST_STEPS) -> None:
        """Step until nothing is left to do, or `num_steps` times."""
        for _ in range(num_steps):
            if not self.core.has_unfinished_requests:
                return
            self.core.step()
        assert num_steps < _MOST_STEPS, f"no end: {self.core.stats()}"

    def settle(self) -> None:
        """Wait for the connector; then nothing may be held, and everything was reported once."""
        assert self.core.wait_for_connector(_SETTLE_S), f"jobs are never reported: {self.core.stats()}"
        self.core.verify()
        assert not self.core.manager.pins.counts, "pins are left"
        received = Counter((load_id, output.rank) for output in self.outputs for load_id in output.received)
        assert set(received.values()) <= {1}, f"loads were reported more than once: {received}"
        assert len(received) == self.core.stats()["kv_loads"] * len(self.worker.memories), "a load was not reported"
        assert not self.foreign_calls, f"pins were given or taken on another thread: {self.foreign_calls}"

    def close(self) -> None:
        """Close the engine and the connector with it."""
        self.core.close()

    def _watch(self) -> None:
        port, pins, here = self.worker.port, self.core.manager.pins, threading.get_ident()
        outputs = port.outputs

        def recorded() -> list[ConnectorOutput]:
            found = outputs()
            self.outputs += map(replace, found)
            return found

        def on_this_thread(name: str, call: Callable[..., None]) -> Callable[..., None]:
            def checked(*args: object) -> None:
                if threading.get_ident() != here:
                    self.foreign_calls.append(name)
                call(*args)

            return checked

        setattr(port, "outputs", recorded)  # noqa: B010
        setattr(pins, "pin", on_this_thread("pin", pins.pin))  # noqa: B010
        setattr(pins, "unpin", on_this_thread("unpin", pins.unpin))  # noqa: B010


class ConnectorContract:
    """The suite. A subclass is named Test… and overrides `make`, and `finds_again` if it is a connector that stores."""

    finds_again = False
    """Whether a prompt is found again when the local cache has been flushed."""

    world_size = 1
    """How many ranks the engine has."""

    put_step: Mapping[int, int] = MappingProxyType({})
    """See `ConnectorContext`."""

    def make(self, context: ConnectorContext) -> Sides:
        """Make the sides of a connector that has nothing stored yet."""
        raise NotImplementedError

    # What it answers where it has nothing.

    def test_where_it_has_nothing_it_says_nothing(self) -> None:
        """An unseen prompt is a miss, and no notification asks for anything."""
        scheduler, worker, manager = self._bare()
        request = _started(manager, "r")
        computed, _, _ = manager.get_computed_blocks(request)
        match = scheduler.get_num_new_matched_tokens(request, computed)
        for _ in range(1000):
            if match.status is not MatchStatus.PENDING:
                break
            time.sleep(0.01)
            match = scheduler.get_num_new_matched_tokens(request, computed)
        assert match.status in (MatchStatus.NONE, MatchStatus.MISS)
        assert match.num_tokens == 0
        scheduler.register_partial_tail(request, [(), (), ()], [])
        assert scheduler.register_finished_partial_tail(request, [(), (), ()], []) is False
        delays, _ = scheduler.request_finished(request, [(), (), ()])
        assert delays is False
        assert scheduler.is_answer_held(request) is False
        self._has_nothing_to_say(scheduler)
        assert collect_output(worker) is None
        self._end(scheduler, worker)

    def test_counters_are_numbers_by_name(self) -> None:
        """Both sides count from the start, before anything was done."""
        scheduler, worker, _ = self._bare()
        for counters in (scheduler.stats(), worker.stats()):
            assert all(isinstance(name, str) and isinstance(value, int | float) for name, value in counters.items())
        self._end(scheduler, worker)

    def test_reports_of_what_it_does_not_know_change_nothing(self) -> None:
        """Ids are unknown, late or repeated, and parts are missing."""
        scheduler, worker, _ = self._bare()
        failure = LoadFailure(_UNKNOWN, 0, 0, 32)
        for output in (
            ConnectorOutput({"nobody"}, {_UNKNOWN}, [failure]),
            ConnectorOutput(failed=[failure]),
            ConnectorOutput(worker_meta="somebody else's"),
            ConnectorOutput(),
        ):
            scheduler.update_connector_output(output)
            scheduler.update_connector_output(output)
        self._has_nothing_to_say(scheduler)
        self._end(scheduler, worker)

    def test_pins_of_hand_offs_come_back_exactly_once(self) -> None:
        """Whoever is handed a pin gives it back, stored or not."""
        engine = ContractEngine(self)
        engine.send([_prompt("pins", 100)])
        manager, connector = engine.core.manager, engine.core.connection.connector
        request = _started(manager, "other", "pins")
        computed, boundary, _ = manager.get_computed_blocks(request)
        assert boundary, "the test's own prompt is not cached"
        for finished in (False, True):
            entries = tuple((group, block, boundary) for group, block in computed.blocks())
            for group, block, _ in entries:
                manager.pins.pin(group, block)
            register = connector.register_finished_partial_tail if finished else connector.register_partial_tail
            register(request, [(), (), ()], [HandOff(boundary, entries)])
            engine.settle()
        engine.close()

    # What it does to requests.

    def test_answers_are_those_of_an_engine_without_it(self) -> None:
        """Cold, flushed and extended prompts of many lengths."""
        engine = ContractEngine(self)
        prompts = [_prompt(i, length) for i, length in enumerate((1, 15, 16, 17, 32, 64, 100, 257))]
        engine.send(prompts)
        assert engine.core.reset_prefix_cache()
        again = engine.send(prompts, name="s")
        hits = [request.num_cached_tokens for request in again]
        assert hits == [(len(prompt) - 1) // 16 * 16 if self.finds_again else 0 for prompt in prompts]
        engine.send([[*prompt, 1, 2, 3] for prompt in prompts], name="t")
        engine.close()

    @pytest.mark.parametrize("num_steps", range(8))
    def test_an_abort_at_any_step_leaves_nothing_behind(self, num_steps: int) -> None:
        """Loads and stores are open at some of them."""
        engine = ContractEngine(self)
        prompts = [_prompt("first", 250), [*_prompt("first", 250), 7]]
        engine.send(prompts)
        assert engine.core.reset_prefix_cache()
        for index, prompt in enumerate([*prompts, _prompt("new", 250)]):
            engine.core.add_request(make_request(f"a{index}", prompt, 30))
        engine.run(num_steps)
        for index in range(3):
            engine.core.abort(f"a{index}")
        engine.run()
        engine.settle()
        engine.send(prompts, name="s")
        engine.close()

    def test_a_step_that_raises_costs_no_report(self) -> None:
        """What was begun in such a step is reported like everything else."""
        engine = ContractEngine(self)
        prompt = _prompt("raise", 250)
        engine.send([prompt])
        assert engine.core.reset_prefix_cache()
        failing = {1, 3, 4}

        def fail_now_and_then(plan: StepPlan) -> None:
            if plan.requests and len(plan.requests[0].token_ids) and failing:
                failing.pop()
                raise RuntimeError("injected")

        engine.worker.before_step = fail_now_and_then
        for index in range(2):
            engine.core.add_request(make_request(f"a{index}", prompt, 5))
        engine.run()
        engine.settle()
        engine.worker.before_step = None
        engine.send([prompt], name="s")
        engine.close()

    def test_what_was_reported_may_be_reported_again_and_late(self) -> None:
        """In another order, when nobody waits any more."""
        engine = ContractEngine(self)
        prompts = [_prompt(i, 150) for i in range(3)]
        for name in "rs":
            engine.send(prompts, name=name)
            assert engine.core.reset_prefix_cache()
        for output in reversed(engine.outputs[:]):
            assert engine.core.scheduler.update_connector(output, 0.0) == []
        engine.settle()
        engine.send(prompts, name="t")
        engine.close()

    # Reset and end.

    def test_after_a_reset_nothing_of_before_is_found(self) -> None:
        """With the store emptied, the next request is cold."""
        engine = ContractEngine(self)
        prompt = _prompt("reset", 250)
        engine.send([prompt])
        assert engine.core.reset_prefix_cache(reset_external=True)
        engine.settle()
        [again] = engine.send([prompt], name="s")
        assert again.num_cached_tokens == 0
        engine.close()

    def test_a_reset_with_requests_under_way_lets_them_start_over(self) -> None:
        """Loads and stores of before publish nothing."""
        engine = ContractEngine(self)
        prompt = _prompt("reset", 250)
        engine.send([prompt])
        assert engine.core.reset_prefix_cache()
        requests = [make_request(f"a{index}", [*prompt, index], 10) for index in range(3)]
        for request in requests:
            engine.core.add_request(request)
        engine.run(2)
        assert engine.core.reset_prefix_cache(reset_running_requests=True, reset_external=True)
        engine.run()
        assert {request.finish_reason for request in requests} == {FinishReason.LENGTH}
        engine.settle()
        engine.close()

    @pytest.mark.parametrize("num_steps", [0, 1, 3])
    def test_an_end_with_work_open_is_an_end(self, num_steps: int) -> None:
        """It comes in time and leaves no thread behind."""
        before = set(threading.enumerate())
        engine = ContractEngine(self)
        prompt = _prompt("end", 250)
        engine.send([prompt])
        assert engine.core.reset_prefix_cache()
        for index in range(3):
            engine.core.add_request(make_request(f"a{index}", [*prompt, index], 10))
        engine.run(num_steps)
        engine.close()
        assert engine.worker.closed
        _wait_for_end(before)

    def test_an_end_before_the_start_is_an_end(self) -> None:
        """Something else kept the engine from starting."""
        before = set(threading.enumerate())
        layout = make_layout("aws", _CONFIG)
        scheduler, (worker,) = self.make(ConnectorContext(layout, _CONFIG, {"weights": "w"}, FakeClock()))
        self._end(scheduler, worker)
        _wait_for_end(before)

    def _bare(self) -> tuple[SchedulerConnector, WorkerConnector, KVCacheManager]:
        """Both sides, bound and registered, without an engine."""
        layout, clock = make_layout("aws", _CONFIG), FakeClock()
        scheduler, (worker,) = self.make(ConnectorContext(layout, _CONFIG, {"weights": "w"}, clock))
        manager = KVCacheManager(layout, _CONFIG, max_step_tokens=100)
        scheduler.bind_block_pool(BoundPool(manager.layout, manager.index, manager.pins))
        manager.bind_connector(scheduler)
        scheduler.on_progress(lambda: None)
        worker.on_progress(lambda: None)
        worker.register_kv_caches(FakeWorker(layout, clock).memories[0])
        return scheduler, worker, manager

    def _has_nothing_to_say(self, scheduler: SchedulerConnector) -> None:
        assert scheduler.build_connector_meta(StepPlan(1, ())) is None
        assert scheduler.has_pending_push_work() is False
        assert scheduler.has_pending_jobs() is False
        assert not list(scheduler.take_events())

    def _end(self, scheduler: SchedulerConnector, worker: WorkerConnector) -> None:
        worker.shutdown()
        scheduler.shutdown()


def _prompt(seed: object, length: int) -> list[int]:
    return random.Random(str(seed)).choices(range(_VOCABULARY), k=length)


def _started(manager: KVCacheManager, name: str, seed: object = "unseen") -> Request:
    request = make_request(name, _prompt(seed, 100))
    manager.start_request(request)
    return request


def _wait_for_end(before: set[threading.Thread]) -> None:
    """Threads of the connector's own have ended, or are about to."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = set(threading.enumerate()) - before
        if not left:
            return
        time.sleep(0.01)
    raise AssertionError(f"threads outlive the connector: {left}")
