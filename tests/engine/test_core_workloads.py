"""Whatever happens, every answer is that of a cold run, counts stay right, and nothing is left behind."""

from hypothesis import given, settings

from tests.conftest import LONG
from tests.engine.core_workload import Run, Workload, workloads

# A whole engine run per example; the profile's number is meant for smaller ones.
NUM_EXAMPLES = 2000 if LONG else 150


@settings(max_examples=NUM_EXAMPLES)
@given(workloads())
def test_every_answer_is_that_of_a_cold_run(workload: Workload) -> None:
    """R1, R5 and R9, with aborts, stops, preemptions, resets and steps that raise in between."""
    Run(workload).play()


@settings(max_examples=NUM_EXAMPLES)
@given(workloads(may_fail=False))
def test_every_request_of_an_undisturbed_run_ends_at_its_length(workload: Workload) -> None:
    run = Run(workload).play()
    stats = run.core.stats()
    assert stats["request_success_length"] == len(run.requests)
    assert stats["generation_tokens"] == sum(run.asked.values())
    assert stats["num_prefilled_tokens"] == sum(request.num_prefilled_tokens for request in run.requests)


@settings(max_examples=NUM_EXAMPLES // 3)
@given(workloads(may_fail=False, caching=False))
def test_without_caching_nothing_is_hit_or_published(workload: Workload) -> None:
    run = Run(workload).play()
    assert all(request.num_cached_tokens == 0 for request in run.requests)
    stats = run.core.stats()
    assert stats.get("prefix_cache_queries", 0) == stats.get("boundary_states_published", 0) == 0
    prompts = sum(request.num_prompt_tokens for request in run.requests if request.sample_index == 0)
    assert stats["prefix_cache_lost_tokens_caching_off"] == prompts
