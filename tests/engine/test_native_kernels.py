"""Native kernels switched on and off, and gone: the same answers, behind hits and beside batch mates."""

import logging
from pathlib import Path
from typing import Any

import pytest

from dalsegno import LLM, SamplingParams
from tests.matrix.tiny_models import tiny_model

SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 128 * 2**20, "max_model_len": 1024, "threads": 1, "debug": True}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
KINDS = ["qwen3-next", "granite-hybrid-moe", "nemotron-h", "lfm2", "qwen3"]


def _prompts() -> list[list[int]]:
    """Return five prompts, of which the last extends the first."""
    prompts = [[(7 * i * i + 31 * number + i) % 4000 + 5 for i in range(33 + 10 * number)] for number in range(4)]
    return [*prompts, [*prompts[0], 9, 10, 11]]


def _answers(llm: LLM, *, together: bool) -> list[tuple[list[int], list[float]]]:
    prompts = _prompts()
    batches = [prompts] if together else [[prompt] for prompt in prompts]
    results = [result for batch in batches for result in llm.generate(batch, GREEDY, use_tqdm=False)]
    llm.verify()
    return [
        (
            list(result.outputs[0].token_ids),
            [max(entry.logprob for entry in row.values()) for row in result.outputs[0].logprobs or []],
        )
        for result in results
    ]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", KINDS)
def test_native_kernels_change_no_answer(kind: str) -> None:
    with LLM(tiny_model(kind), native_kernels=False, enable_prefix_caching=False, **SMALL) as torch_alone:
        expected = _answers(torch_alone, together=False)
    with LLM(tiny_model(kind), **SMALL) as native:
        runs = [_answers(native, together=together) for together in (False, True, False)]
        assert native.generate([_prompts()[0]], GREEDY, use_tqdm=False)[0].num_cached_tokens
    for answers in runs:
        for (tokens, logprobs), (other_tokens, other_logprobs) in zip(answers, expected, strict=True):
            assert tokens == other_tokens
            assert logprobs == pytest.approx(other_logprobs, abs=1e-4, rel=1e-4)


def test_without_a_compiler_torch_answers_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.INFO, "dalsegno"), LLM(tiny_model("qwen3-next"), **SMALL) as llm:
        answer = llm.generate([_prompts()[0]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert [record.getMessage() for record in caplog.records if "native" in record.getMessage()] == [
        "torch runs everything: no C compiler (cc, gcc, clang) for the native kernels"
    ]
    assert len(answer) == 20
