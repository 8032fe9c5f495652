"""What is counted is what happened: prefilled, cached, recovered and lost tokens, per request and in total."""

import random

import pytest

from dalsegno.config import CacheConfig
from dalsegno.engine.core import EngineCore
from dalsegno.request import Request
from dalsegno.testing.builders import layout_alone, make_core, make_cut, make_layout, make_request, run_all
from dalsegno.testing.fake_worker import FakeWorker


def worker_of(core: EngineCore) -> FakeWorker:
    assert isinstance(core.worker, FakeWorker)
    return core.worker


def mixed_requests(rng: random.Random, count: int, max_model_len: int) -> list[Request]:
    """Prompts that share, extend, resend and diverge, under three salts."""
    shared = [[rng.randrange(50) for _ in range(max_model_len)] for _ in range(4)]
    requests = []
    for number in range(count):
        prompt = shared[rng.randrange(4)][: rng.randrange(1, max_model_len // 2)]
        prompt = prompt + [rng.randrange(50) for _ in range(rng.choice([0, 1, 16, 40]))]
        requests.append(
            make_request(
                f"r{number}",
                prompt,
                rng.choice([1, 2, 30]),
                n=rng.choice([1, 1, 1, 3]),
                cache_salt=rng.choice([None, None, "a", "b"]),
                checkpoint_at=(rng.randrange(1, 100),),
            )
        )
    return requests


@pytest.mark.parametrize("budget", [24, 2048])
@pytest.mark.parametrize("kinds", ["a", "s", "as", "aws"])
def test_totals_are_the_sums_of_what_requests_report(kinds: str, budget: int) -> None:
    """SCENARIOS 86: reconciled to the token over 200 mixed requests."""
    config = CacheConfig(block_size=32)
    core = make_core(make_layout(kinds, config, num_slabs=3000), config, max_model_len=300, budget=budget)
    requests = mixed_requests(random.Random(7), 200, 200)
    run_all(core, requests)
    stats = core.stats()
    assert stats["prompt_tokens"] == sum(request.num_prompt_tokens for request in requests)
    assert stats["prefix_cache_queries"] == stats["prompt_tokens"]
    assert stats["prefix_cache_hits"] == sum(request.num_cached_tokens or 0 for request in requests)
    samples = [sample for request in requests for sample in (request, *request.siblings)]
    assert stats["num_prefilled_tokens"] == sum(sample.num_prefilled_tokens for sample in samples)
    lost = [name for name in stats if name.startswith("prefix_cache_lost_tokens_")]
    for name in lost:
        reason = name.removeprefix("prefix_cache_lost_tokens_")
        assert stats[name] == sum(request.hit_report.lost.get(reason, 0) for request in requests)
    assert stats["prefix_cache_hits"] + sum(stats[name] for name in lost) == stats["prompt_tokens"]


@pytest.mark.parametrize("budget", [7, 24, 2048])
def test_a_request_prefills_its_prompt_less_what_was_cached(budget: int) -> None:
    """Counted in the worker, where a hit that is reported but computed again would show."""
    core = make_core(make_layout(num_slabs=2000), max_model_len=300, budget=budget)
    for request in mixed_requests(random.Random(budget), 60, 200):
        request.siblings = []
        run_all(core, [request])
        assert request.num_cached_tokens is not None
        assert request.num_prefilled_tokens == request.num_prompt_tokens - request.num_cached_tokens
        in_worker = worker_of(core).num_computed[request.request_id]
        assert in_worker == request.num_prefilled_tokens + request.num_output_tokens - 1


def small_pool(max_model_len: int = 120) -> EngineCore:
    config = CacheConfig()
    layout = make_cut("as", [1, 1])
    need = layout_alone(layout, config, max_model_len=max_model_len, budget=64)
    return make_core(layout.with_slabs(need + 8), config, max_model_len=max_model_len, budget=64)


def test_what_a_preempted_request_finds_again_is_not_a_hit() -> None:
    """SCENARIOS 83: random prompts in a small pool hit nothing, however often they are preempted."""
    core = small_pool()
    rng = random.Random(1)
    requests = [make_request(f"r{i}", [rng.randrange(10**6) for _ in range(40)], 70) for i in range(6)]
    run_all(core, requests)
    stats = core.stats()
    assert stats["num_preemptions"] > 3
    assert stats["num_recovered_tokens"] > 0
    assert stats.get("prefix_cache_hits", 0) == 0
    assert stats["prefix_cache_queries"] == stats["prompt_tokens"] == 240
    assert {request.num_cached_tokens for request in requests} == {0}
    assert sum(request.num_preemptions for request in requests) == stats["num_preemptions"]


def test_tokens_prefilled_again_are_counted_again_and_as_prefill() -> None:
    core = small_pool()
    requests = [make_request(f"r{i}", range(1000 * i, 1000 * i + 40), 70) for i in range(6)]
    run_all(core, requests)
    total = sum(worker_of(core).num_computed.values())
    decoded = sum(request.num_output_tokens - 1 for request in requests)
    again = core.stats()["num_prefilled_tokens"] - 240
    assert again > 0
    # A token sampled before a preemption is prefilled after it instead of decoded.
    assert 240 + decoded <= total <= 240 + decoded + again


def test_the_hit_of_the_first_admission_is_the_one_reported() -> None:
    core = make_core(max_model_len=300)
    run_all(core, [make_request("before", range(50))])
    request = make_request("r", range(70), 40)
    core.add_request(request)
    for _ in range(30):
        core.step()
    core.scheduler._preempt(request)
    run_all(core)
    assert (request.num_cached_tokens, request.hit_report.boundary) == (48, 48)
    assert request.num_preemptions == 1
    assert core.stats()["num_recovered_tokens"] == 96
    assert core.stats()["prefix_cache_hits"] == 48


def test_times_are_those_of_the_clock() -> None:
    core = make_core(max_model_len=300, budget=16)
    request = make_request("r", range(40), 5)
    run_all(core, [request])
    # Three steps of prefill, the third samples; then four of decoding.
    assert (request.first_token_time, request.finish_time) == (3.0, 7.0)


def test_gauges_show_what_is_in_use_at_the_moment() -> None:
    core = make_core(make_cut("as", [4, 1], num_slabs=11), max_model_len=100)
    assert core.stats()["kv_cache_usage_perc"] == 0.0
    core.add_request(make_request("r", range(40), 5))
    core.add_request(make_request("s", range(500, 540), 5))
    core.step()
    stats = core.stats()
    assert (stats["num_requests_running"], stats["num_requests_waiting"]) == (2, 0)
    assert stats["num_reclaimable_slabs"] < stats["num_slabs"] == 10
    assert stats["kv_cache_usage_perc"] == 1 - stats["num_reclaimable_slabs"] / 10
    run_all(core)
    stats = core.stats()
    assert (stats["num_reclaimable_slabs"], stats["kv_cache_usage_perc"]) == (10, 0.0)
    assert stats["num_cached_blocks"] == len(core.manager.index) > 0
