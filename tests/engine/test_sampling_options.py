"""Penalties and biases in the engine: the tokens known so far count, whatever chunks and preemptions there were."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from dalsegno import LLM, SamplingParams
from dalsegno.engine.outputs import RequestOutput
from dalsegno.errors import RequestError
from dalsegno.worker.model_worker import ModelWorker
from tests.matrix.tiny_models import tiny_model

SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 64 * 2**20, "max_model_len": 512, "threads": 1, "debug": True}
PROMPTS = [[(7 * i * i + i + base) % 90 + 5 for i in range(count)] for base, count in ((0, 70), (1, 33), (2, 100))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=18, ignore_eos=True, **options)
    for options in (
        # A random model repeats nothing by itself, so what shows is a reward.
        {"repetition_penalty": 0.3},
        {"presence_penalty": -2.0, "frequency_penalty": -2.0},
        {"logit_bias": {11: 5.0, 12: 6.0}, "repetition_penalty": 0.7, "frequency_penalty": 1.0},
    )
]


def _run(prompts: Sequence[list[int]], params: Sequence[SamplingParams], **options: Any) -> list[RequestOutput]:
    """Answer prompts together, checking each token against the rules; every seventh step preempts a request."""
    logits: dict[tuple[str, int], np.ndarray] = {}

    def observe(request_id: str, position: int, row: Tensor) -> None:
        logits[request_id, position] = row.numpy().copy()

    preempts = options.pop("preempts", False)
    with LLM(tiny_model("qwen3-next"), **SMALL, **options) as llm:
        worker, scheduler = llm.core.worker, llm.core.scheduler
        assert isinstance(worker, ModelWorker)
        worker.logits_observer = observe
        found: dict[int, RequestOutput] = {}
        stream = llm.stream([{"prompt_token_ids": prompt} for prompt in prompts], list(params))
        for count, output in enumerate(stream, 1):
            found[int(output.request_id)] = output
            if preempts and count % 7 == 0 and scheduler.running:
                scheduler._preempt(scheduler.running[-1])
        if preempts:
            assert llm.stats()["num_preemptions"] > 3
    outputs = [found[index] for index in range(len(prompts))]
    for output, asked in zip(outputs, params, strict=True):
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        for i, token in enumerate(answer):
            row = _naive(logits[output.request_id, len(prompt) + i], asked, prompt, answer[:i])
            assert token == int(row.argmax())
    return outputs


def _naive(row: np.ndarray, params: SamplingParams, prompt: list[int], answer: list[int]) -> np.ndarray:
    row = row.copy()
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    for token in {*prompt, *answer}:
        penalty = np.float32(params.repetition_penalty)
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token in set(answer):
        row[token] -= params.frequency_penalty * answer.count(token) + params.presence_penalty
    return row


def _answers(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_answers_do_not_depend_on_batches_chunks_or_preemption() -> None:
    alone = [_answers(_run([prompt], [params]))[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    plain = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)
    assert all(a != b for a, b in zip(alone, _answers(_run(PROMPTS, [plain] * 3)), strict=True)), "no rule shows"
    for options in ({}, {"max_num_batched_tokens": 23}, {"preempts": True}, {"enable_prefix_caching": False}):
        assert _answers(_run(PROMPTS, PARAMS, **options)) == alone, options


def test_a_hit_changes_no_answer_of_a_request_with_penalties() -> None:
    with LLM(tiny_model("qwen3-next"), **SMALL) as llm:
        cold, warm = (llm.generate({"prompt_token_ids": PROMPTS[0]}, PARAMS[0])[0] for _ in range(2))
    assert warm.num_cached_tokens
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


def test_a_bias_for_a_token_beyond_the_vocabulary_is_refused() -> None:
    with (
        LLM(tiny_model("qwen3-next"), **SMALL) as llm,
        pytest.raises(RequestError, match=r"sampling_params: logit_bias must be below .* got 900000"),
    ):
        llm.generate({"prompt_token_ids": [5]}, SamplingParams(logit_bias={900000: 1.0}))
