"""SCENARIOS 58: log-probabilities of a prompt need every token computed, whatever is cached, and still publish."""

from collections.abc import Iterable
from typing import Any

import pytest

from dalsegno import LLM, SamplingParams
from dalsegno.config import CacheConfig
from dalsegno.engine.core import EngineCore
from dalsegno.engine.outputs import RequestOutput
from dalsegno.request import Request
from dalsegno.testing.builders import make_core, make_cut, make_request, run_all
from dalsegno.testing.fake_worker import FakeWorker, expected_prompt_logprobs, expected_tokens
from dalsegno.types import StepPlan
from dalsegno.worker import logprobs
from tests.engine.stand_in import make_llm
from tests.matrix.tiny_models import tiny_model

SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 64 * 2**20, "max_model_len": 512, "threads": 1, "debug": True}
PROMPT = [(7 * i * i + i) % 90 + 5 for i in range(100)]


def engine(kinds: str = "as", **options: Any) -> EngineCore:
    layout = make_cut(kinds, [1] * len(kinds), block_size=32, num_slabs=200)
    return make_core(layout, CacheConfig(block_size=32), max_model_len=300, **options)


def asking(name: str = "asking", prompt: Iterable[int] = PROMPT, n: int = 1, max_tokens: int = 5) -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, n=n, prompt_logprobs=2)
    return make_request(name, prompt, max_tokens, n=n, params=params)


def assert_right(core: EngineCore, request: Request) -> None:
    assert isinstance(core.worker, FakeWorker)
    prompt, vocab_size = request.token_ids[: request.num_prompt_tokens].tolist(), core.worker.vocab_size
    assert request.prompt_logprobs == expected_prompt_logprobs(core.layout, prompt, 2, vocab_size)
    answer = expected_tokens(core.layout, prompt, request.num_output_tokens, vocab_size, request.sample_index)
    assert request.output_token_ids == answer
    core.verify()


@pytest.mark.parametrize("kinds", ["a", "s", "as", "aws"])
@pytest.mark.parametrize("budget", [7, 40, 512])
@pytest.mark.parametrize("length", [1, 2, 16, 33, 96, 100])
def test_a_warm_cache_gives_no_hit_and_every_row(kinds: str, budget: int, length: int) -> None:
    core = engine(kinds, budget=budget)
    prompt = PROMPT[:length]
    run_all(core, [make_request("before", prompt, 20)])
    would_hit = make_request("would hit", prompt)
    run_all(core, [would_hit])
    assert would_hit.num_cached_tokens == (length - 1) // 16 * 16
    request = asking(prompt=prompt)
    run_all(core, [request])
    assert_right(core, request)
    report = request.hit_report
    if length == 1:
        return
    assert (request.num_cached_tokens, report.boundary, request.num_prefilled_tokens) == (0, 0, length)
    assert report.lost.get("prompt_logprobs", 0) == would_hit.num_cached_tokens
    assert sum(report.lost.values()) == length
    assert core.stats()["prefix_cache_lost_tokens_prompt_logprobs"] == would_hit.num_cached_tokens


def test_it_publishes_what_it_computed() -> None:
    core = engine()
    run_all(core, [asking()])
    after = make_request("after", PROMPT)
    run_all(core, [after])
    assert after.num_cached_tokens == 96


@pytest.mark.parametrize("steps", range(1, 8))
def test_a_preempted_request_starts_over_until_all_rows_are_there(steps: int) -> None:
    core = engine(budget=32)
    run_all(core, [make_request("before", PROMPT, 10)])
    request = asking(max_tokens=30)
    core.add_request(request)
    for _ in range(steps):
        core.step()
    complete = not request.awaits_prompt_logprobs
    assert complete == (steps >= 4)
    starts: list[int] = []
    assert isinstance(core.worker, FakeWorker)
    core.worker.before_step = lambda plan: starts.append(plan.requests[0].start)
    core.scheduler._preempt(request)
    run_all(core)
    assert starts[0] == (96 if complete else 0)
    assert_right(core, request)


def test_a_failed_step_leaves_no_row_behind() -> None:
    core = engine(budget=32)
    request = asking()

    def fail(plan: StepPlan) -> None:
        if plan.step_id == 2:
            raise ValueError("planted")

    assert isinstance(core.worker, FakeWorker)
    core.worker.before_step = fail
    run_all(core, [request])
    assert core.stats()["num_failed_steps"] == 1
    assert_right(core, request)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 64])
def test_the_rows_come_once_for_all_samples_and_the_others_may_hit(max_num_seqs: int) -> None:
    core = engine(max_num_seqs=max_num_seqs)
    request = asking(n=3)
    samples = [request, *request.siblings]
    run_all(core, [request])
    assert_right(core, request)
    assert [len(sample.prompt_logprobs) for sample in samples] == [99, 0, 0]
    assert [sample.num_prefilled_tokens for sample in samples[max_num_seqs:]] == [100 + 1 - 96] * (3 - max_num_seqs)


def test_it_waits_for_no_prefix_it_cannot_use() -> None:
    core = engine(budget=40)
    first, second = make_request("first", PROMPT, 5), asking()
    run_all(core, [first, second])
    assert second.num_wait_steps == 0
    assert core.stats()["num_prefix_wait_steps"] == 0
    assert_right(core, second)


def test_rows_are_asked_for_once_each() -> None:
    core = engine(budget=24)
    asked: list[tuple[int, int]] = []

    def note(plan: StepPlan) -> None:
        for part in plan.requests:
            if part.prompt_rows is not None:
                begin = part.start + part.prompt_rows.first
                asked.append((begin, begin + len(part.prompt_rows.token_ids)))

    assert isinstance(core.worker, FakeWorker)
    core.worker.before_step = note
    request = asking()
    core.add_request(request)
    core.step()
    core.step()
    core.scheduler._preempt(request)
    run_all(core)
    assert [row for begin, end in asked for row in range(begin, end)] == list(range(99))


def _ask(llm: LLM, prompt: list[int] = PROMPT, count: int = 3, n: int = 1) -> RequestOutput:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=count, n=n)
    return llm.generate({"prompt_token_ids": prompt}, params)[0]


def _reference(prompt: list[int]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(tiny_model("qwen3-next")), dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0].log_softmax(-1)


def _check(output: RequestOutput, reference: Any, count: int, tokenizer: Any) -> None:
    rows = output.prompt_logprobs
    assert rows is not None
    assert rows[0] is None
    assert len(rows) == len(output.prompt_token_ids)
    for token, row, values in zip(output.prompt_token_ids[1:], rows[1:], reference, strict=False):
        assert row is not None
        best = values.topk(count).indices.tolist() if count else []
        assert list(row) == [token, *(other for other in best if other != token)]
        for token_id, found in row.items():
            assert found.logprob == pytest.approx(float(values[token_id]), abs=2e-4)
            assert found.rank == int((values >= values[token_id]).sum())
            assert found.decoded_token == tokenizer.decode([token_id])


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("budget", [23, 512])
def test_values_are_those_of_transformers_with_a_warm_cache(
    count: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = _reference(PROMPT)
    with LLM(tiny_model("qwen3-next"), **SMALL, max_num_batched_tokens=budget) as llm:
        _check(_ask(llm, count=count), reference, count, llm.get_tokenizer())
        # Three rows a slice: a chunk is cut into many.
        monkeypatch.setattr(logprobs, "_SLICE_ELEMENTS", 3 * 4096)
        (warm,) = llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=1))
        assert warm.num_cached_tokens
        again = _ask(llm, count=count, n=2)
        assert again.num_cached_tokens == 0
        _check(again, reference, count, llm.get_tokenizer())


def test_beside_others_and_a_request_that_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(monkeypatch, max_num_batched_tokens=30)
    alone = _ask(llm)
    assert llm.reset_prefix_cache()
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 2, "ignore_eos": True}
    silent, beside = llm.generate(
        [{"prompt_token_ids": PROMPT}] * 2, [SamplingParams(**params), SamplingParams(**params, prompt_logprobs=3)]
    )
    assert silent.prompt_logprobs is None
    assert beside.prompt_logprobs == alone.prompt_logprobs
    assert _ask(llm, [7]).prompt_logprobs == [None]
