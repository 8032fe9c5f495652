"""Log-probabilities of sampled tokens: those of a cold model, whatever happens on the way."""

import math
from typing import Any

import pytest

from dalsegno import LLM, SamplingParams
from dalsegno.config import CacheConfig
from dalsegno.engine.outputs import CompletionOutput, Logprob
from dalsegno.request import Request
from dalsegno.testing.builders import make_core, make_cut, make_request, run_all
from dalsegno.testing.fake_worker import FakeWorker, expected_logprobs
from tests.engine.stand_in import IM_END, make_llm, small_tokenizer
from tests.matrix.tiny_models import tiny_model

SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 64 * 2**20, "max_model_len": 512, "threads": 1, "debug": True}
PROMPT = [(7 * i * i + i) % 90 + 5 for i in range(75)]


def _check_fake(request: Request, count: int, core: Any) -> None:
    assert isinstance(core.worker, FakeWorker)
    assert len(request.logprobs) == request.num_output_tokens
    for i, row in enumerate(request.logprobs):
        known = request.token_ids[: request.num_prompt_tokens + i + 1].tolist()
        assert row == expected_logprobs(core.layout, known, count, core.worker.vocab_size)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("budget", [7, 40, 512])
@pytest.mark.parametrize("max_num_seqs", [2, 64])
def test_each_sampled_token_has_its_row_whatever_chunks_and_preemptions(n: int, budget: int, max_num_seqs: int) -> None:
    core = make_core(
        make_cut("aws", [1, 1, 1], block_size=32, num_slabs=200),
        CacheConfig(block_size=32),
        max_model_len=300,
        budget=budget,
        max_num_seqs=max_num_seqs,
    )
    params = SamplingParams(temperature=0, max_tokens=40, n=n, logprobs=2)
    asking = make_request("asking", PROMPT, 40, n=n, params=params)
    silent = make_request("silent", PROMPT, 40)
    samples = [asking, *asking.siblings]
    for request in (asking, silent):
        core.add_request(request)
    for step in range(10_000):
        if not core.has_unfinished_requests:
            break
        core.step()
        if step % 17 == 9 and core.scheduler.running:
            core.scheduler._preempt(core.scheduler.running[-1])
    assert core.stats()["num_preemptions"] > 0
    for sample in samples:
        assert sample.num_output_tokens == 40
        _check_fake(sample, 2, core)
    assert silent.logprobs == []


def test_a_failed_step_leaves_no_row_behind() -> None:
    core = make_core()
    request = make_request("r", PROMPT, 5, params=SamplingParams(temperature=0, max_tokens=5, logprobs=0))
    assert isinstance(core.worker, FakeWorker)
    failing = {2}

    def fail(plan: Any) -> None:
        if plan.step_id in failing:
            raise ValueError("planted")

    core.worker.before_step = fail
    run_all(core, [request])
    assert core.stats()["num_failed_steps"] == 1
    _check_fake(request, 0, core)


def _reference(prompt: list[int], answer: list[int]) -> Any:
    """Log-probabilities `[answer, vocab]` of the reference implementation."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(tiny_model("qwen3-next")), dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0]
    return logits.log_softmax(-1)[len(prompt) - 1 : -1]


def _check_rows(answer: CompletionOutput, reference: Any, count: int, tokenizer: Any) -> None:
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    for token, row, values in zip(answer.token_ids, answer.logprobs, reference, strict=True):
        best = values.topk(count).indices.tolist() if count else []
        assert list(row) == [token, *(other for other in best if other != token)]
        for token_id, found in row.items():
            assert found.logprob == pytest.approx(float(values[token_id]), abs=2e-4)
            assert found.rank == int((values >= values[token_id]).sum())
            assert found.decoded_token == tokenizer.decode([token_id])
    total = math.fsum(row[token].logprob for token, row in zip(answer.token_ids, answer.logprobs, strict=True))
    assert answer.cumulative_logprob == pytest.approx(total)


# The rules that change what is sampled must not show: what is reported are the model's own.
@pytest.mark.parametrize("options", [{}, {"temperature": 1.3, "seed": 4, "top_k": 50, "presence_penalty": -2.0}])
@pytest.mark.parametrize("count", [0, 5])
def test_values_are_those_of_transformers(options: dict[str, Any], count: int) -> None:
    given = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": count} | options
    with LLM(tiny_model("qwen3-next"), **SMALL, max_num_batched_tokens=31) as llm:
        for n in (1, 3):
            (output,) = llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(**given, n=n))
            for answer in output.outputs:
                _check_rows(answer, _reference(PROMPT, answer.token_ids), count, llm.get_tokenizer())
        assert output.num_cached_tokens


def test_who_does_not_ask_gets_none_and_a_stream_only_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(monkeypatch)
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    (plain,) = llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(**params))
    assert (plain.outputs[0].logprobs, plain.outputs[0].cumulative_logprob) == (None, None)
    seen = list(llm.stream({"prompt_token_ids": PROMPT}, SamplingParams(**params, logprobs=1)))
    last = seen[-1].outputs[0].logprobs
    assert last is not None
    for output in seen:
        answer = output.outputs[0]
        assert answer.logprobs == last[: len(answer.token_ids)]
    assert len(last) == 6


def test_texts_of_special_tokens_are_as_they_are_written() -> None:
    from dalsegno.engine.logprobs import LogprobReader
    from dalsegno.types import TokenLogprobs

    row = TokenLogprobs((IM_END, 40, IM_END), (-1.0, -0.5, -1.0), 3)
    tokenizer = small_tokenizer()
    assert LogprobReader(tokenizer).read([row]) == [
        {IM_END: Logprob(-1.0, 2, "<|im_end|>"), 40: Logprob(-0.5, 1, tokenizer.decode([40]))}
    ]
    assert LogprobReader(None).read([row])[0][40] == Logprob(-0.5, 1, None)
