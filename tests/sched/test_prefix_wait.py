"""A prefix that is being computed is waited for, never for long and never for somebody who does not run."""

import pytest

from dalsegno.config import CacheConfig
from dalsegno.hashing.block_hash import extend_block_hashes, root_hash
from dalsegno.request import Request, RequestStatus
from dalsegno.sched.prefix_wait import PlannedBoundaries
from dalsegno.testing.builders import make_request
from dalsegno.types import StepPlan
from tests.engine.core_workload import quiet_log
from tests.sched.recorder import UNIT, Recorder


def hashed(token_ids: list[int]) -> Request:
    request = make_request("r", token_ids)
    extend_block_hashes(root_hash(UNIT), request.block_hashes, request.token_ids, UNIT)
    return request


def test_the_longest_planned_boundary_on_the_chain_is_found() -> None:
    planned = PlannedBoundaries(UNIT)
    planned.add(hashed(list(range(100))), [32, 64, 96])
    planned.add(hashed([*range(64), *[9] * 36]), [80])
    same, branched, other = (hashed(t) for t in (list(range(100)), [*range(70), *[8] * 30], list(range(1, 100))))
    assert planned.longest(0, same.block_hashes, 100) == 96
    assert planned.longest(0, same.block_hashes, 96) == 64
    assert planned.longest(96, same.block_hashes, 100) == 0
    assert planned.longest(0, branched.block_hashes, 100) == 64
    assert planned.longest(64, branched.block_hashes, 100) == 0
    assert planned.longest(0, other.block_hashes, 99) == 0
    assert planned.has(80, hashed([*range(64), *[9] * 20]).block_hashes[4])
    assert not planned.has(80, same.block_hashes[4])


@pytest.mark.parametrize("kinds", ["a", "s", "as", "aws"])
@pytest.mark.parametrize("n", [17, 64, 100])
@pytest.mark.parametrize("budget", [24, 2048])
def test_a_burst_of_identical_prompts_is_computed_once(n: int, budget: int, kinds: str) -> None:
    """ "One burst of identical prompts should compute once" (SCENARIOS, what users ask for)."""
    case = Recorder(kinds, budget=budget)
    burst = [make_request(f"r{i}", range(n), 3) for i in range(8)]
    case.run(burst)
    rest = n - (n - 1) // UNIT * UNIT
    assert [request.num_prefilled_tokens for request in burst] == [n] + [rest] * 7
    assert case.core.stats()["num_prefilled_tokens"] == n + 7 * rest
    assert case.core.stats()["num_prefix_wait_steps"] > 0
    case.assert_right(*burst)


def test_a_shared_system_prompt_that_is_marked_is_computed_once() -> None:
    case = Recorder(budget=64)
    requests = [make_request(f"r{i}", [*range(200), *[900 + i] * 30], 3, checkpoint_at=(200,)) for i in range(5)]
    case.run(requests)
    assert [request.num_prefilled_tokens for request in requests] == [230] + [230 - 192] * 4
    case.assert_right(*requests)


def test_others_pass_who_waits() -> None:
    case = Recorder(budget=40)
    case.run([make_request("first", range(300), 2), make_request("same", range(300), 2)], steps=1)
    case.run([make_request("other", range(5000, 5004), 2)])
    assert case.first_step("other") == 1
    assert case.first_step("same") > 8


def test_waiting_ends_when_the_boundary_is_committed_and_not_when_the_request_ends() -> None:
    case = Recorder(budget=512)
    case.run([make_request("first", range(100), 200), make_request("same", range(100), 2)])
    assert case.first_step("same") == 1


def running_and_waiting() -> tuple[Recorder, Request, Request]:
    """One request in the middle of its prompt, and one that waits for its prefix."""
    case = Recorder(budget=32)
    first, second = make_request("first", range(320), 5), make_request("second", range(320), 5)
    case.run([first, second], steps=3)
    assert first.num_computed_tokens == 96
    assert second.status is RequestStatus.WAITING
    return case, first, second


def test_waiting_ends_with_an_abort_and_what_was_computed_is_used() -> None:
    case, _, second = running_and_waiting()
    case.core.abort("first")
    case.run(steps=1)
    assert case.steps[-1] == {"second": (96, 128)}
    case.run()
    case.assert_right(second)


def test_waiting_ends_with_a_preemption() -> None:
    """It waits for running requests alone, so two that waited for each other cannot stop."""
    case, first, second = running_and_waiting()
    case.core.scheduler._preempt(first)
    case.run()
    case.assert_right(first, second)
    assert case.num_computed(first) + case.num_computed(second) < 320 + 32 + 10


def test_waiting_ends_with_a_step_that_raises() -> None:
    case, first, second = running_and_waiting()

    def raising(plan: StepPlan) -> None:
        case.worker.before_step = case.record
        raise ValueError("planted")

    case.worker.before_step = raising
    with quiet_log():
        case.run()
    case.assert_right(first, second)


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_waiting_ends_after_so_many_steps(steps: int) -> None:
    case = Recorder(budget=32, prefix_wait_steps=steps, max_num_seqs=4)
    first, second = make_request("first", range(2000, 2016), 200), make_request("second", range(2000, 2016), 200)
    slow, late = make_request("slow", range(512), 1), make_request("late", range(512), 1)
    case.run([first, second], steps=4)
    case.add(slow, late)
    case.run(steps=steps + 1)
    # Two decoders leave thirty tokens, of which the slow prompt takes one unit: there is budget for the late one.
    assert late.num_wait_steps == steps
    case.run()
    case.assert_right(slow, late)


def test_nobody_waits_with_caching_off() -> None:
    config = CacheConfig(enable_prefix_caching=False)
    case = Recorder(config=config, budget=512)
    case.run([make_request(f"r{i}", range(100), 2) for i in range(3)])
    assert case.steps[0].keys() == {"r0", "r1", "r2"}


def test_nobody_waits_for_what_another_salt_computes() -> None:
    case = Recorder(budget=512)
    case.run([make_request("r", range(100), 2), make_request("salted", range(100), 2, cache_salt="x")])
    assert case.steps[0].keys() == {"r", "salted"}


def test_a_prompt_that_diverges_before_any_planned_boundary_does_not_wait() -> None:
    case = Recorder(budget=512)
    case.run([make_request("r", range(100), 2), make_request("branch", [*range(80), *[7] * 20], 2)])
    assert case.steps[0].keys() == {"r", "branch"}


def test_a_chain_of_extensions_arriving_together_is_computed_once() -> None:
    """Each turn of a conversation waits for the one before it."""
    case = Recorder(budget=64)
    turns = [make_request(f"turn {i}", range(60 * (i + 1)), 2) for i in range(4)]
    case.run(turns)
    # Behind each other's tails: 48 of 60, 112 of 120, 176 of 180.
    assert [request.num_prefilled_tokens for request in turns] == [60, 120 - 48, 180 - 112, 240 - 176]
    case.assert_right(*turns)
