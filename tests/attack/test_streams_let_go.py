"""Streams that are dropped, closed or interrupted at the worst moment: nobody hangs and nothing is left behind."""

import gc
from typing import Any

import pytest

from dalsegno.engine.llm import LLM
from dalsegno.errors import EngineError, RequestError
from dalsegno.sampling_params import SamplingParams
from dalsegno.testing.fake_worker import expected_tokens
from dalsegno.types import StepPlan
from tests.engine.stand_in import VOCAB_SIZE, make_llm, worker_of

PROMPT, OTHER = [5, 6, 7] * 9, [8, 9] * 20


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    return make_llm(monkeypatch)


def _params(**given: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 12, "ignore_eos": True} | given))


def _expected(llm: LLM, prompt: list[int], count: int = 12) -> list[int]:
    return expected_tokens(worker_of(llm).layout, prompt, count, VOCAB_SIZE)


class _Holder:
    """Holds a stream and itself, so that only the garbage collector ends it."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.me = stream, self


@pytest.mark.parametrize("at_step", [2, 3, 12])
def test_a_stream_collected_inside_a_step_disturbs_nobody(llm: LLM, at_step: int) -> None:
    worker = worker_of(llm)
    gc.disable()
    try:
        holder = _Holder(llm.stream(PROMPT, _params(max_tokens=100)))
        next(holder.stream)
        del holder

        def collect(_plan: StepPlan) -> None:
            if worker.num_steps == at_step:
                gc.collect()

        worker.before_step = collect
        assert llm.generate(OTHER, _params())[0].outputs[0].token_ids == _expected(llm, OTHER)
        assert llm.stats()["request_success_abort"] == 1
        assert not llm.core.has_unfinished_requests
        llm.verify()
    finally:
        gc.enable()


@pytest.mark.parametrize("read", [0, 1, 5])
def test_a_stream_of_a_closed_llm_says_so(llm: LLM, read: int) -> None:
    stream = llm.stream([PROMPT, OTHER], _params(n=2))
    for _ in range(read):
        next(stream)
    llm.close()
    with pytest.raises(RequestError, match="closed"):
        list(stream)
    assert list(stream) == []


def test_a_stream_whose_end_meets_an_interrupt_still_ends(llm: LLM) -> None:
    worker = worker_of(llm)
    text = llm.generate(PROMPT, _params())[0].outputs[0].text
    stream = llm.stream(PROMPT, _params(stop=text[3:5], max_tokens=100))
    stopped: list[str] = []
    stop = llm.core.stop

    def note(request_id: str, stop_reason: str) -> None:
        stopped.append(request_id)
        stop(request_id, stop_reason)

    def interrupt(_plan: StepPlan) -> None:
        if stopped:
            worker.before_step = None
            raise KeyboardInterrupt

    llm.core.stop = note  # type: ignore[method-assign]
    worker.before_step = interrupt
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(OTHER, _params(max_tokens=100))
    last = list(stream)[-1]
    assert (last.outputs[0].finish_reason, last.outputs[0].text) == ("stop", text[: text.index(text[3:5])])
    llm.verify()


def test_a_call_from_inside_a_step_is_refused_and_disturbs_nobody(llm: LLM) -> None:
    worker = worker_of(llm)
    refused: list[str] = []

    def call(_plan: StepPlan) -> None:
        with pytest.raises(RequestError, match="in the middle of a step") as caught:
            llm.generate(PROMPT, _params())
        with pytest.raises(RequestError, match="in the middle of a step"):
            llm.close()
        refused.append(str(caught.value))

    worker.before_step = call
    assert llm.generate(OTHER, _params())[0].outputs[0].token_ids == _expected(llm, OTHER)
    assert len(refused) == 12
    assert llm.stats()["prompt_tokens"] == len(OTHER)
    llm.verify()


def test_an_engine_whose_step_was_left_in_the_middle_serves_nothing_more(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = llm.stream(OTHER, _params())
    next(stream)

    def interrupt(*_given: Any, **_named: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.core.scheduler, "commit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPT, _params())
    monkeypatch.undo()
    with pytest.raises(EngineError, match="make a new engine"):
        list(stream)
    with pytest.raises(EngineError, match="make a new engine"):
        llm.generate(PROMPT, _params())
    worker = worker_of(llm)
    llm.close()
    assert worker.closed
