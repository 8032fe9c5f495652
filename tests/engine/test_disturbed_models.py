"""Every kind of tiny model answers as a cold run whatever disturbs it: aborts, preemptions, steps that raise."""

import random
from collections.abc import Callable, Iterator

import pytest

from dalsegno.config import CacheConfig, SchedulerConfig
from dalsegno.engine.core import EngineCore
from dalsegno.kv.layout import plan_layout
from dalsegno.models.tiny import TINY_KINDS
from dalsegno.request import FinishReason, Request
from dalsegno.types import StepPlan, StepResult
from tests.conftest import LONG
from tests.engine.core_workload import quiet_log
from tests.matrix.comparison import differences
from tests.matrix.test_switch_matrix import COLD, backend_of
from tests.matrix.workload import Answers, Prompt, add, run_cell

Disturbance = Callable[[EngineCore], None]
MAX_STEPS = 100
NUM_STEPS = 16


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet_log():
        yield


def raise_once(core: EngineCore, error: BaseException, *, behind_the_forward: bool = False) -> None:
    execute = core.worker.execute

    def raising(plan: StepPlan) -> StepResult:
        core.worker.execute = execute  # type: ignore[method-assign]
        if behind_the_forward:
            execute(plan)
        raise error

    core.worker.execute = raising  # type: ignore[method-assign]


def preempt(core: EngineCore, which: int) -> None:
    if core.scheduler.running:
        core.scheduler._preempt(core.scheduler.running[which])


DISTURBANCES: dict[str, Disturbance] = {
    "preempt the first": lambda core: preempt(core, 0),
    "preempt the last": lambda core: preempt(core, -1),
    "raise": lambda core: raise_once(core, ValueError("planted")),
    "raise behind the forward": lambda core: raise_once(core, ValueError("planted"), behind_the_forward=True),
    "interrupt": lambda core: raise_once(core, KeyboardInterrupt()),
    "abort long": lambda core: core.abort("long"),
    "abort samples #1": lambda core: core.abort("samples #1"),
}


def prompts(vocab_size: int) -> list[Prompt]:
    """A chunked and marked prompt, one that shares its opening, a resend, samples; then what was left behind."""
    rng = random.Random(3)
    ids = tuple(rng.randrange(vocab_size) for _ in range(160))
    return [
        Prompt("long", ids[:70], 5, checkpoint_at=(37,)),
        Prompt("shared", ids[:40] + ids[70:79], 6),
        Prompt("resend", ids[:70], 3),
        Prompt("samples", ids[100:120], 5, samples=2),
        Prompt("again", ids[:70], 4),
        Prompt("extended", ids[:70] + ids[79:81], 4),
        Prompt("samples again", ids[100:120], 4),
    ]


def run(core: EngineCore, kind: str, asked: list[Prompt], at: int, what: Disturbance) -> list[Request]:
    requests = [request for prompt in asked for request in add(core, backend_of(kind), prompt)]
    for step in range(1, MAX_STEPS):
        if not core.has_unfinished_requests:
            return requests
        if step == at:
            what(core)
        try:
            core.step()
        except KeyboardInterrupt:
            core.verify()
    raise AssertionError("the workload does not end")


def disturbed(kind: str, at: int, what: Disturbance, cold: Answers) -> list[str]:
    """What differs from the cold answers when something happens before step `at`; an aborted answer may be shorter."""
    backend, answers, asked = backend_of(kind), Answers(), prompts(backend_of(kind).vocab_size)
    config = CacheConfig(block_size=32, hash_block_size=16)
    layout = plan_layout(backend.specs, config, num_slabs=60)
    worker = backend.worker(layout, answers.logits, (), {})
    core = EngineCore(worker, backend.clock, layout, config, SchedulerConfig(128, 24), debug=True)
    requests = run(core, kind, asked[:4], at, what) + run(core, kind, asked[4:], 0, what)
    expected = Answers(tokens=dict(cold.tokens), logits=cold.logits)
    for request in requests:
        name = request.request_id
        answers.tokens[name], answers.cached[name] = request.output_token_ids, request.num_cached_tokens or 0
        if request.finish_reason is FinishReason.ABORT:
            expected.tokens[name] = cold.tokens[name][: request.num_output_tokens]
        else:
            assert request.finish_reason is FinishReason.LENGTH, request.error
    assert answers.cached["again"] == 64
    core.verify()
    assert core.reset_prefix_cache()
    return differences(expected, answers, {request.request_id: request.num_prompt_tokens for request in requests})[0]


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_a_disturbance_at_any_step_changes_no_answer(kind: str) -> None:
    backend = backend_of(kind)
    cold = run_cell(backend, COLD, [prompts(backend.vocab_size)])
    names = list(DISTURBANCES)
    for at in range(1, NUM_STEPS + 1):
        # At full size everything happens at every step, else one thing at each, another one in each kind.
        turn = at + TINY_KINDS.index(kind)
        for name in names if LONG else [names[turn % len(names)]]:
            assert disturbed(kind, at, DISTURBANCES[name], cold) == [], f"{name} before step {at}"
