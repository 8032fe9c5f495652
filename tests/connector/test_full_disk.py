"""An engine on a store whose disk is full or fills up: right answers, and counters that say what happened."""

import random
from pathlib import Path

from dalsegno import LLM, SamplingParams
from tests.matrix.tiny_models import tiny_model
from tests.small_disk import fill

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def engine(store: Path | None, **extra: str) -> LLM:
    options = {}
    if store is not None:
        settings = {"store": "embedded", "path": str(store), "bytes": 2**23, **extra}
        options = {"kv_transfer_config": {"kv_connector": "StoreConnector", "kv_connector_extra_config": settings}}
    return LLM(tiny_model("qwen3-next"), kv_cache_memory_bytes=2**27, threads=1, max_model_len=2048, **options)


def answers(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    found = []
    for ids in prompts:
        [output] = llm.generate([ids], PARAMS, use_tqdm=False)
        found.append((list(output.outputs[0].token_ids), output.num_cached_tokens or 0))
        assert llm.core.wait_for_connector(60)
        assert llm.reset_prefix_cache()
    return found


def test_on_a_full_disk_nothing_is_stored_until_there_is_room(small_disk: Path) -> None:
    prompts = [random.Random(seed).choices(range(4096), k=300) for seed in range(6)]
    with engine(None) as llm:
        cold = [tokens for tokens, _ in answers(llm, prompts)]
    ballast = fill(small_disk)
    with engine(small_disk / "store") as llm:
        assert answers(llm, [*prompts, *prompts]) == [(tokens, 0) for tokens in [*cold, *cold]]
        stats = llm.stats()
        assert stats["kv_offload_allocation_failure"] + stats["kv_offload_stores_skipped"] > 0
        assert stats["kv_offload_store_objects"] == 0
        assert stats["kv_offload_jobs_incomplete"] == stats["kv_offload_jobs"]
        llm.verify()
        ballast.unlink()
        # The gate opens with a save that is let through after a pause.
        for _ in range(200):
            [(tokens, cached)] = answers(llm, prompts[:1])
            assert tokens == cold[0]
            if cached:
                break
        assert cached == 288
        llm.verify()


def test_a_store_that_is_full_of_others_keeps_what_was_used_last(small_disk: Path) -> None:
    """It evicts: a load of more than it holds costs hits on the oldest, never an answer.

    By a thread, since pages that a small store frees in one process serve again only when the others have synced.
    """
    prompts = [random.Random(seed).choices(range(4096), k=700) for seed in range(12)]
    with engine(None) as llm:
        cold = [tokens for tokens, _ in answers(llm, prompts)]
    with engine(small_disk / "store", offload_worker="thread") as llm:
        fill(small_disk)
        assert [tokens for tokens, _ in answers(llm, prompts)] == cold
        stats = llm.stats()
        assert stats["kv_store_evicted_objects"] > 0
        assert stats["kv_store_used_bytes"] <= stats["kv_store_capacity_bytes"]
        again = answers(llm, prompts[::-1])
        assert [tokens for tokens, _ in again] == cold[::-1]
        assert again[0][1] == 688, "the last one stored was evicted"
        llm.verify()
