"""Aborts, preemptions and steps that raise, at every step index of a fixed workload."""

from collections.abc import Callable, Iterator

import pytest

from dalsegno.config import CacheConfig
from dalsegno.engine.core import EngineCore, RequestUpdate
from dalsegno.request import FinishReason, Request, RequestStatus
from dalsegno.testing.builders import layout_alone, make_core, make_cut, make_request, run_all
from dalsegno.testing.fake_worker import FakeWorker, expected_tokens
from dalsegno.types import StepPlan
from tests.engine.core_workload import quiet_log

UNIT = 4
MAX_MODEL_LEN = 100
BUDGET = 24
SHAPES = [("as", 1, 1), ("as", 4, 10), ("aws", 2, 2), ("a", 2, 1)]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet_log():
        yield


def engine(kinds: str, units_per_block: int, times_needed: int) -> EngineCore:
    config = CacheConfig(
        block_size=UNIT * units_per_block,
        hash_block_size=UNIT,
        decode_checkpoint_interval=UNIT,
        max_states_per_request=6,
    )
    layout = make_cut(kinds, [2, 1, 1][: len(kinds)], block_size=config.block_size, hash_block_size=UNIT, window=14)
    need = layout_alone(layout, config, max_model_len=MAX_MODEL_LEN, budget=BUDGET)
    return make_core(layout.with_slabs(times_needed * need), config, max_model_len=MAX_MODEL_LEN, budget=BUDGET)


def prompts() -> list[Request]:
    """A chunked prompt, a shared prefix, an extension, a resend, and three samples of one prompt."""
    return [
        make_request("long", range(70), 6, checkpoint_at=(30,)),
        make_request("shared", [*range(40), *[200] * 9], 9),
        make_request("resend", range(70), 3),
        make_request("samples", range(300, 317), 7, n=3),
        make_request("short", [5], 4),
    ]


def worker_of(core: EngineCore) -> FakeWorker:
    assert isinstance(core.worker, FakeWorker)
    return core.worker


def run(core: EngineCore, at: int, what: Callable[[EngineCore], None]) -> list[Request]:
    """Play the workload; before step `at` (from 1 on) `what` happens. Returns all samples."""
    requests = prompts()
    samples = [sample for request in requests for sample in (request, *request.siblings)]
    for request in requests:
        core.add_request(request)
    step = 0
    while core.has_unfinished_requests:
        step += 1
        if step == at:
            what(core)
        try:
            core.step()
        except KeyboardInterrupt:
            core.verify()
        assert step < 400, "the workload does not end"
    assert all(sample.status is RequestStatus.FINISHED for sample in samples)
    core.verify()
    return samples


def assert_right(core: EngineCore, samples: list[Request]) -> None:
    for sample in samples:
        prompt = sample.token_ids[: sample.num_prompt_tokens].tolist()
        expected = expected_tokens(
            core.layout, prompt, sample.num_output_tokens, worker_of(core).vocab_size, sample.sample_index
        )
        assert sample.output_token_ids == expected


def num_steps(shape: tuple[str, int, int]) -> int:
    core = engine(*shape)
    run(core, 0, lambda core: None)
    return worker_of(core).num_steps


def raise_once(core: EngineCore, error: BaseException) -> None:
    def raising(plan: StepPlan) -> None:
        worker_of(core).before_step = None
        raise error

    worker_of(core).before_step = raising


@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_that_raises_at_any_time_costs_no_request_its_answer(shape: tuple[str, int, int]) -> None:
    for at in range(1, num_steps(shape) + 1):
        core = engine(*shape)
        samples = run(core, at, lambda core: raise_once(core, ValueError("planted")))
        assert {sample.finish_reason for sample in samples} == {FinishReason.LENGTH}
        assert_right(core, samples)
        assert core.stats()["num_failed_steps"] == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_that_raises_after_it_wrote_everything_counts_for_nothing(shape: tuple[str, int, int]) -> None:
    """R2: what a step wrote is published by its commit, and a step that raised has none."""
    for at in range(1, num_steps(shape) + 1):
        core = engine(*shape)
        worker = worker_of(core)
        execute = worker.execute

        def raising(plan: StepPlan, execute: Callable = execute, worker: FakeWorker = worker) -> None:  # type: ignore[type-arg]
            execute(plan)
            worker.execute = execute  # type: ignore[method-assign]
            raise ValueError("planted behind the forward")

        def what(core: EngineCore, worker: FakeWorker = worker, raising: Callable = raising) -> None:  # type: ignore[type-arg]
            worker.execute = raising  # type: ignore[method-assign]

        samples = run(core, at, what)
        assert {sample.finish_reason for sample in samples} == {FinishReason.LENGTH}
        assert_right(core, samples)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_interrupt_at_any_time_leaves_the_engine_usable(shape: tuple[str, int, int]) -> None:
    for at in range(1, num_steps(shape) + 1):
        core = engine(*shape)
        samples = run(core, at, lambda core: raise_once(core, KeyboardInterrupt()))
        assert {sample.finish_reason for sample in samples} == {FinishReason.LENGTH}
        assert_right(core, samples)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("request_id", ["long", "shared", "samples", "samples#1"])
def test_an_abort_at_any_time_ends_that_request_alone(request_id: str, shape: tuple[str, int, int]) -> None:
    for at in range(1, num_steps(shape) + 1):
        core = engine(*shape)
        samples = run(core, at, lambda core: core.abort(request_id))
        assert_right(core, samples)
        for sample in samples:
            # With the sample that carries the prefill, those that wait for it end.
            may_end = sample.request_id == request_id or request_id == "samples" == sample.request_id.split("#")[0]
            assert sample.finish_reason is FinishReason.LENGTH or may_end
        assert core.reset_prefix_cache()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("which", [0, -1])
def test_a_preemption_at_any_time_changes_no_answer(which: int, shape: tuple[str, int, int]) -> None:
    def preempt(core: EngineCore) -> None:
        if core.scheduler.running:
            core.scheduler._preempt(core.scheduler.running[which])

    for at in range(1, num_steps(shape) + 1):
        core = engine(*shape)
        samples = run(core, at, preempt)
        assert {sample.finish_reason for sample in samples} == {FinishReason.LENGTH}
        assert_right(core, samples)


def test_preempting_everybody_before_every_second_step_still_ends() -> None:
    core = engine("as", 1, 2)
    requests = prompts()
    samples = [sample for request in requests for sample in (request, *request.siblings)]
    for request in requests:
        core.add_request(request)
    for step in range(600):
        if not core.has_unfinished_requests:
            break
        if step % 2:
            for request in list(core.scheduler.running):
                core.scheduler._preempt(request)
        core.step()
    assert {sample.finish_reason for sample in samples} == {FinishReason.LENGTH}
    assert_right(core, samples)


@pytest.mark.parametrize("poisoned", ["long", "resend", "samples", "short"])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_request_that_always_raises_ends_with_an_error_and_no_other(
    shape: tuple[str, int, int], poisoned: str
) -> None:
    core = engine(*shape)

    def raising(plan: StepPlan) -> None:
        if any(part.request_id == poisoned for part in plan.requests):
            raise ValueError("this request is poisoned")

    worker_of(core).before_step = raising
    samples = run(core, 0, lambda core: None)
    for sample in samples:
        if sample.request_id.split("#")[0] == poisoned:
            assert sample.finish_reason is FinishReason.ERROR
            assert sample.error == "ValueError: this request is poisoned"
        else:
            assert sample.finish_reason is FinishReason.LENGTH
    assert_right(core, samples)
    assert core.stats()["num_failed_steps"] == 2


def test_a_request_that_raises_late_fails_the_step_of_others_once() -> None:
    core = engine("as", 1, 10)

    def raising(plan: StepPlan) -> None:
        if any(part.request_id == "shared" and part.end > 52 for part in plan.requests):
            raise ValueError("poisoned from its fifth token on")

    worker_of(core).before_step = raising
    samples = run(core, 0, lambda core: None)
    reasons = {sample.request_id: sample.finish_reason for sample in samples}
    assert reasons.pop("shared") is FinishReason.ERROR
    assert set(reasons.values()) == {FinishReason.LENGTH}
    assert core.stats()["num_failed_steps"] == 2
    assert_right(core, samples)


def test_a_worker_that_is_broken_for_good_ends_every_request_with_an_error() -> None:
    core = engine("as", 1, 2)

    def raising(plan: StepPlan) -> None:
        raise RuntimeError("the device is gone")

    worker_of(core).before_step = raising
    samples = run(core, 0, lambda core: None)
    assert {sample.finish_reason for sample in samples} == {FinishReason.ERROR}
    worker_of(core).before_step = None
    run_all(core, [request := make_request("good", range(30), 5)])
    assert_right(core, [request])


def test_updates_of_a_step_that_was_interrupted_come_with_the_next() -> None:
    core = engine("as", 1, 10)
    for request in prompts():
        core.add_request(request)
    core.step()
    core.abort("long")
    raise_once(core, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        core.step()
    assert core.has_unfinished_requests
    assert [u.request.request_id for u in core.step() if u.finished] == ["long"]


@pytest.mark.parametrize("when", ["before it runs", "while it runs"])
def test_an_aborted_request_says_so_and_keeps_its_tokens(when: str) -> None:
    core = engine("as", 1, 10)
    request = make_request("r", range(20), 30)
    core.add_request(request)
    if when == "while it runs":
        for _ in range(5):
            core.step()
    before = request.num_output_tokens
    core.abort("r")
    updates: list[RequestUpdate] = core.step()
    assert [(update.request, update.new_token_ids, update.finished) for update in updates] == [(request, [], True)]
    assert (request.finish_reason, request.num_output_tokens) == (FinishReason.ABORT, before)
    assert request.finish_time is not None


def test_a_stop_string_ends_a_request_with_its_reason() -> None:
    core = engine("as", 1, 10)
    request = make_request("r", range(20), 30)
    core.add_request(request)
    for _ in range(3):
        core.step()
    core.stop("r", "END")
    core.step()
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "END")
    core.verify()


def test_aborting_what_nobody_knows_does_nothing() -> None:
    core = engine("as", 1, 10)
    core.abort("nobody")
    core.stop("nobody", "END")
    assert core.step() == []
    run_all(core, [request := make_request("r", range(20), 3)])
    core.abort("r")
    assert core.step() == []
    assert request.finish_reason is FinishReason.LENGTH


def test_an_abort_of_a_request_that_is_gone_does_not_hit_the_next_one_of_that_id() -> None:
    """SCENARIOS 23: ids are used again."""
    core = engine("as", 1, 10)
    run_all(core, [make_request("r", range(20), 3)])
    core.abort("r")
    core.stop("r", "END")
    run_all(core, [request := make_request("r", range(20), 3)])
    assert request.finish_reason is FinishReason.LENGTH


def test_closing_ends_everything_and_closes_the_worker() -> None:
    core = engine("as", 1, 2)
    requests = prompts()
    for request in requests:
        core.add_request(request)
    core.step()
    core.close()
    assert worker_of(core).closed
    assert all(request.finish_reason is FinishReason.ABORT for request in requests)
    core.verify()
