"""Recorded dialogues hit as far as a cache that never forgets could, and answer as a cold run does."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.null_worker import NullWorker
from benchmarks.replay import (
    Agreement,
    Served,
    compare_with_cold,
    infinite_cache_bound,
    judge,
    load_dialogues,
    replay,
)
from dalsegno import LLM, SamplingParams
from dalsegno.cli.conversations import RecordedConversation
from tests.matrix.tiny_models import tiny_model

PARAMS = SamplingParams(temperature=0.0, max_tokens=1)


def test_the_bound_is_the_longest_prefix_shared_with_any_earlier_prompt() -> None:
    first = list(range(40))
    prompts = [first, first, [*first[:20], 99, *first[21:]], [*first, 7, 8], [99], first[:32]]
    # The whole prompt is never a hit, and what no earlier prompt began with is none.
    assert infinite_cache_bound(prompts, 4) == [0, 36, 20, 40, 0, 28]
    assert infinite_cache_bound(prompts, 16) == [0, 32, 16, 32, 0, 16]


@pytest.mark.slow
def test_twenty_dialogues_hit_99_percent_of_what_an_endless_cache_could(traces_folder: Path) -> None:
    # What is cached does not depend on what is computed, so no model runs; rendering, scheduler and cache are real.
    with LLM(tiny_model("qwen3-next"), kv_cache_memory_bytes=2 << 30) as llm:
        llm.core.worker.close()
        llm.core.worker = NullWorker()
        served = list(replay(llm, load_dialogues(traces_folder, 20), PARAMS))
        assert not llm.stats()["num_evicted_blocks"], "memory was not ample"
        llm.verify()
    assert len({request.dialogue for request in served}) == 20
    bounds = infinite_cache_bound([request.token_ids for request in served], 16)
    assert all(request.cached <= bound for request, bound in zip(served, bounds, strict=True))
    assert sum(request.cached for request in served) >= 0.99 * sum(bounds)


@pytest.mark.slow
def test_sampled_requests_of_a_dialogue_answer_as_a_cold_run(traces_folder: Path) -> None:
    model = tiny_model("qwen3-next")
    [whole] = load_dialogues(traces_folder, 1)
    dialogue = RecordedConversation(whole.name, whole.messages[:12], whole.tools)
    with LLM(model, kv_cache_memory_bytes=1 << 28) as llm:
        served = list(replay(llm, [dialogue], PARAMS))
    assert sum(request.cached > 0 for request in served) >= 3
    with LLM(model, kv_cache_memory_bytes=1 << 28, enable_prefix_caching=False) as cold:
        agreement = compare_with_cold(cold, served, 2, PARAMS)
    assert (agreement.compared, agreement.broken, agreement.ties) == (2, [], 0)


def test_another_answer_is_told_from_the_cold_one() -> None:
    cold = np.array([0.0, 1.0, 0.5], dtype=np.float32)
    for logits, token, broken, ties in (
        (cold, 1, 0, 0),
        (cold + 1e-3, 1, 1, 0),
        (cold * np.nan, 1, 1, 0),
        (cold, 2, 1, 0),
    ):
        agreement = Agreement()
        judge(agreement, Served("dialogue", [1, 2], 1, {}, token, logits), cold, 1)
        assert (agreement.compared, len(agreement.broken), agreement.ties) == (1, broken, ties)
    # Where the cold run itself could have gone either way, the other token is a tie.
    agreement = Agreement()
    judge(agreement, Served("dialogue", [1, 2], 1, {}, 2, cold), np.array([0.0, 1.0, 1.0], dtype=np.float32), 1)
    assert agreement.ties == 1
