"""Whatever happens to requests, store and reports: answers are cold, puts are right, and nothing is left behind."""

from collections import Counter

import pytest

from tests.conftest import LONG
from tests.connector.multi_workload import MultiRun
from tests.connector.store_workload import StoreRun

NUM_SEEDS, NUM_STEPS = (200, 500) if LONG else (12, 400)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_every_answer_is_cold_and_every_put_is_right(seed: int) -> None:
    """R1, R5 to R7, R9; 27, 29, 31, 34, 48, 50, 67, 74: chunks, aborts, preemptions, resets, faults, odd reports."""
    StoreRun(seed).play(NUM_STEPS)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_so_it_is_with_several_connectors_in_any_order(seed: int) -> None:
    """35, 61, 62, 64: two stores of their own room, faults and reports, and children that report what is not theirs."""
    MultiRun(seed).play(NUM_STEPS)


EVENTS = (
    "audited",
    "kv_loads",
    "kv_load_failures",
    "kv_load_timeouts",
    "external_prefix_cache_hits",
    "kv_offload_jobs",
    "kv_offload_jobs_dropped",
    "kv_offload_jobs_incomplete",
    "kv_offload_allocation_failure",
    "kv_offload_lost_objects",
    "num_preemptions",
    "num_evicted_blocks",
    "request_success_abort",
    "request_success_stop",
)


def test_the_runs_meet_what_they_are_made_for() -> None:
    """Loads, failures, timeouts, drops, preemptions and resets do happen in them.

    When a store's threads come to run is not the seed's to say, so a few runs more may be needed than usual.
    """
    seen: Counter[str] = Counter()
    for seed in range(1000, 1080):
        run = StoreRun(seed)
        run.play(250)
        for engine in run.engines:
            seen.update(engine.core.stats())
        seen["audited"] += run.audit.num_audited
        if all(seen[name] > 0 for name in EVENTS):
            return
    assert {name: seen[name] for name in EVENTS if not seen[name]} == {}
