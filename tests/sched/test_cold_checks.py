"""Cold checks on integers: who is checked, what nobody sees of it, and that it is in nobody's way."""

from typing import Any

import pytest

from dalsegno.config import CacheConfig
from dalsegno.engine.core import EngineCore
from dalsegno.request import FinishReason, Request
from dalsegno.sampling_params import SamplingParams
from dalsegno.sched.cold_checks import ColdCheckSetup, Mismatch, Verdict, compare_rows
from dalsegno.testing.builders import layout_alone, make_core, make_layout, make_request, run_all
from dalsegno.testing.fake_worker import FakeWorker, expected_logprobs
from dalsegno.testing.faults import plant
from dalsegno.types import StepPlan, TokenLogprobs

PROMPT = [(7 * i * i + i) % 90 + 5 for i in range(100)]
TWO_STEPS = PROMPT + PROMPT[:60]

QUIET = (
    "prefix_cache_verified",
    "prefix_cache_verify_dropped",
    "prefix_cache_verify_tokens",
    "num_cached_blocks",
    "num_evicted_blocks",
)


def checked(share: float = 1.0, seed: int = 0, **options: Any) -> tuple[EngineCore, list[Mismatch]]:
    found: list[Mismatch] = []
    return make_core(cold_checks=ColdCheckSetup(share, seed, report=found.append), **options), found


def finish_checks(core: EngineCore) -> None:
    steps = 0
    while core.has_pending_checks:
        assert core.step() == []
        steps += 1
        assert steps < 1000
    core.verify()


def resend(core: EngineCore, count: int, prompt: list[int] = PROMPT, **fields: Any) -> list[Request]:
    requests = [make_request(f"r{i}", prompt, 12, **fields) for i in range(count)]
    for request in requests:
        run_all(core, [request])
    return requests


@pytest.mark.parametrize(
    ("cold", "seen", "verdict"),
    [
        ((-1.0, -0.5, -2.0), (-1.0, -0.5, -2.0), Verdict.SAME),
        ((-1.0, -0.5, -2.0), (-1.00019, -0.5, -2.0), Verdict.SAME),
        ((-1.0, -0.5, -2.0), (-1.0003, -0.5, -2.0), Verdict.MISMATCH),
        ((-1.0, -0.5, -2.0), (-1.0, -0.5, -2.1), Verdict.MISMATCH),
        ((-1.0, -0.5, -0.5001), (-1.0, -0.5001, -0.5), Verdict.SAME),
        ((-1.0, -0.5, -2.0), (-1.0, float("nan"), -2.0), Verdict.MISMATCH),
    ],
)
def test_values_may_differ_by_rounding_only(cold: Any, seen: Any, verdict: Verdict) -> None:
    rows = TokenLogprobs((1, 2, 3), cold, 1), TokenLogprobs((1, 2, 3), seen, 1)
    assert compare_rows(*rows, 1e-4)[0] is verdict


@pytest.mark.parametrize(
    ("second", "scale", "verdict"),
    [(-0.5001, 0.0, Verdict.TIE), (-0.6, 0.0, Verdict.MISMATCH), (-0.51, 99.0, Verdict.TIE)],
)
def test_another_likeliest_token_is_a_tie_where_the_cold_run_has_one(
    second: float, scale: float, verdict: Verdict
) -> None:
    cold = TokenLogprobs((1, 2, 3), (-1.0, -0.5, second), 1, scale)
    seen = TokenLogprobs((1, 3, 2), (-1.0, -0.5, second), 1, scale)
    assert compare_rows(cold, seen, 1e-4)[0] is verdict


def test_every_hit_is_checked_and_nothing_else() -> None:
    core, found = checked()
    resend(core, 4)
    finish_checks(core)
    assert core.stats()["prefix_cache_verified"] == 3
    assert core.stats()["prefix_cache_verify_tokens"] == 3 * (100 + 8 - 1)
    assert found == []


def test_a_share_is_about_that_share_and_the_same_every_time() -> None:
    counts = []
    for _ in range(2):
        core, _ = checked(0.3, seed=5)
        resend(core, 1)
        for i in range(200):
            run_all(core, [make_request(f"again {i}", PROMPT, 1)])
        finish_checks(core)
        counts.append(core.stats()["prefix_cache_verified"])
    assert counts[0] == counts[1]
    assert 40 <= counts[0] <= 80


def test_nobody_sees_a_check() -> None:
    answers, stats = [], []
    for share in (0.0, 1.0):
        core, _ = checked(share)
        params = SamplingParams(temperature=0, max_tokens=12, logprobs=1, n=2)
        requests = resend(core, 3, n=2, params=params)
        assert core.has_pending_checks == bool(share)
        assert not core.has_unfinished_requests
        finish_checks(core)
        samples = [sample for request in requests for sample in (request, *request.siblings)]
        answers.append([(r.output_token_ids, r.logprobs, r.num_prefilled_tokens) for r in samples])
        stats.append({name: value for name, value in core.stats().items() if name not in QUIET})
        assert core.manager.reset_prefix_cache()
    assert answers[0] == answers[1]
    assert stats[0] == stats[1]


def test_a_check_publishes_nothing() -> None:
    core, _ = checked()
    resend(core, 3)
    published = len(core.manager.index)
    assert core.has_pending_checks
    finish_checks(core)
    assert len(core.manager.index) == published


def test_a_waiting_check_leaves_a_step_to_requests_that_fill_it() -> None:
    core, _ = checked(budget=32)
    resend(core, 2)
    seen: list[list[str]] = []
    assert isinstance(core.worker, FakeWorker)
    core.worker.before_step = lambda plan: seen.append([part.request_id for part in plan.requests])
    run_all(core, [make_request("other", [3] * 100, 1)])
    assert seen[:3] == [["other"]] * 3
    finish_checks(core)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_that_needs_the_room_of_a_check_gets_it(policy: str) -> None:
    config, longest = CacheConfig(), 200
    layout = make_layout(config=config)
    layout = layout.with_slabs(layout_alone(layout, config, max_model_len=longest, budget=512))
    core, found = checked(layout=layout, max_model_len=longest, budget=512, policy=policy)
    resend(core, 2, TWO_STEPS)
    core.step()
    assert core.scheduler.checks.holds_blocks
    request = make_request("large", [9] * 190, 9, priority=10**9)
    core.add_request(request)
    updates = core.step()
    assert [update.request for update in updates] == [request], "the first token comes as if there were no check"
    run_all(core)
    assert request.finish_reason is FinishReason.LENGTH
    finish_checks(core)
    assert core.stats()["prefix_cache_verified"] == 1
    assert core.stats()["num_preemptions"] == 0
    assert found == []


def test_a_prompt_and_answer_of_the_greatest_length_are_checked() -> None:
    core, _ = checked(max_model_len=104)
    for i in range(2):
        run_all(core, [make_request(f"r{i}", PROMPT, 4)])
    finish_checks(core)
    assert core.stats()["prefix_cache_verified"] == 1


def test_what_was_aborted_or_waits_at_the_end_is_counted_as_dropped() -> None:
    core, _ = checked()
    resend(core, 2)
    aborted = make_request("aborted", PROMPT, 50)
    core.add_request(aborted)
    core.step()
    core.abort("aborted")
    run_all(core)
    finish_checks(core)
    assert core.stats()["prefix_cache_verify_dropped"] == 1
    resend(core, 2, TWO_STEPS)
    core.step()
    assert core.scheduler.checks.holds_blocks
    core.close()
    assert core.stats()["prefix_cache_verify_dropped"] == 2
    core.manager.verify()
    assert not core.manager.requests


def test_a_check_whose_step_raises_is_dropped_and_harms_nobody() -> None:
    core, _ = checked()
    resend(core, 2)

    def fail(plan: StepPlan) -> None:
        if any(part.request_id.startswith("cold check") for part in plan.requests):
            raise ValueError("planted")

    assert isinstance(core.worker, FakeWorker)
    core.worker.before_step = fail
    other = make_request("other", [3] * 40, 3)
    run_all(core, [other])
    finish_checks(core)
    assert other.output_token_ids
    assert core.stats()["prefix_cache_verify_dropped"] == 1


def test_a_reset_takes_the_blocks_of_a_check() -> None:
    core, _ = checked()
    resend(core, 2, TWO_STEPS)
    core.step()
    assert core.scheduler.checks.holds_blocks
    assert core.reset_prefix_cache()
    assert len(core.manager.index) == 0
    finish_checks(core)
    assert core.stats()["prefix_cache_verified"] == 1


def test_a_mismatch_names_the_token_and_forgets_the_chain() -> None:
    core, found = checked()
    plant(core, "neighbours_state")
    run_all(core, [make_request("neighbour", [5] * 64, 1)])
    resend(core, 2)
    finish_checks(core)
    [mismatch] = found
    assert mismatch.request.request_id == "r1"
    assert mismatch.position == 100
    assert isinstance(core.worker, FakeWorker)
    tokens = mismatch.request.token_ids[:101].tolist()
    assert mismatch.expected == expected_logprobs(core.layout, tokens, 2, core.worker.vocab_size)
    assert core.stats()["prefix_cache_mismatches"] == 1
    assert core.stats()["prefix_cache_verify_evicted_blocks"] == len(mismatch.forgotten) > 6
    again = make_request("again", PROMPT, 12)
    run_all(core, [again])
    assert again.num_cached_tokens == 0
