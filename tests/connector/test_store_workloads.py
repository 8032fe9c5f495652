"""Whatever happens to requests, store and reports: answers are cold, puts are right, and nothing is left behind."""

import pytest

from tests.conftest import LONG
from tests.connector.store_workload import StoreRun

NUM_SEEDS, NUM_STEPS = (200, 500) if LONG else (12, 400)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_every_answer_is_cold_and_every_put_is_right(seed: int) -> None:
    """R1, R5 to R7, R9; 27, 29, 31, 34, 48, 50, 67, 74: chunks, aborts, preemptions, resets, faults, odd reports."""
    StoreRun(seed).play(NUM_STEPS)


def test_the_runs_meet_what_they_are_made_for() -> None:
    """Loads, failures, timeouts, drops, preemptions and resets do happen in them."""
    seen: dict[str, float] = {}
    for seed in range(1000, 1012):
        run = StoreRun(seed)
        run.play(250)
        for engine in run.engines:
            for name, value in engine.core.stats().items():
                seen[name] = seen.get(name, 0) + value
        seen["audited"] = seen.get("audited", 0) + run.audit.num_audited
    for name in (
        "audited",
        "kv_loads",
        "kv_load_failures",
        "kv_load_timeouts",
        "external_prefix_cache_hits",
        "kv_offload_jobs",
        "kv_offload_jobs_dropped",
        "kv_offload_jobs_incomplete",
        "kv_offload_allocation_failure",
        "num_preemptions",
        "num_evicted_blocks",
        "request_success_abort",
        "request_success_stop",
    ):
        assert seen.get(name, 0) > 0, f"{name} never happens: {seen}"
