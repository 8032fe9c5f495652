"""Who runs, in which order, with how many tokens."""

import itertools
import random
from typing import Any

import pytest

from dalsegno.config import CacheConfig
from dalsegno.errors import OptionError
from dalsegno.request import RequestStatus
from dalsegno.testing.builders import STALL_STEPS, layout_alone, make_core, make_cut, make_request, run_all
from tests.conftest import LONG
from tests.sched.recorder import UNIT, Recorder


@pytest.mark.parametrize("budget", [1, 5, 15, 16, 17, 24, 40, 64, 1000])
def test_chunks_fill_the_budget_and_end_at_whole_units_where_they_can(budget: int) -> None:
    """So that what a preempted prefill has computed can be published."""
    case = Recorder(budget=budget)
    request = make_request("r", range(100), 2)
    case.run([request])
    ends = [end for step in case.steps for _, end in step.values()]
    starts = [start for step in case.steps for start, _ in step.values()]
    assert starts == [0, *ends[:-1]]
    for start, end in zip(starts, ends, strict=True):
        assert 0 < end - start <= budget
        if end < 100:
            crosses = (start + budget) // UNIT > start // UNIT
            assert end % UNIT == 0 if crosses else end - start == budget
    case.assert_right(request)


def test_running_requests_come_before_new_ones_and_new_ones_take_what_is_left() -> None:
    case = Recorder(budget=40)
    first = make_request("first", range(10), 20)
    case.run([first], steps=3)
    case.run([make_request("second", range(500, 600), 2)], steps=1)
    assert case.steps[-1] == {"first": (12, 13), "second": (0, 32)}


def test_no_step_computes_more_than_its_budget_or_more_requests_than_allowed() -> None:
    case = Recorder(budget=33, max_num_seqs=5)
    rng = random.Random(3)
    requests = [
        make_request(f"r{i}", range(1000 * i, 1000 * i + rng.randrange(1, 90)), rng.randrange(1, 30)) for i in range(20)
    ]
    case.run(requests)
    for step in case.steps:
        assert sum(end - start for start, end in step.values()) <= 33
        assert len(step) <= 5
    case.assert_right(*requests)


def test_first_come_first_served() -> None:
    """Without a common prefix to wait for, nobody starts before somebody who came earlier."""
    for seed in range(40 if LONG else 8):
        rng = random.Random(seed)
        case = Recorder(
            budget=rng.choice([7, 33, 200]), max_num_seqs=rng.choice([1, 3, 64]), num_slabs=rng.choice([45, 200])
        )
        names = []
        for number in range(12):
            length = rng.randrange(1, 200)
            names.append(f"r{number}")
            case.add(make_request(names[-1], range(1000 * number, 1000 * number + length), rng.randrange(1, 40)))
            case.run(steps=rng.randrange(4))
        case.run()
        starts = [case.first_step(name) for name in names]
        assert starts == sorted(starts)


def test_a_request_that_does_not_fit_yet_is_not_overtaken() -> None:
    """Else a large request would wait for as long as small ones keep coming."""
    config = CacheConfig()
    layout = make_cut("as", [1, 1])
    need = layout_alone(layout, config, max_model_len=200, budget=256)
    core = make_core(layout.with_slabs(need + 2), config, max_model_len=200, budget=256)
    first = make_request("first", range(60), 30)
    large = make_request("large", range(1000, 1190), 5)
    small = make_request("small", range(2000, 2010), 5)
    for request in (first, large, small):
        core.add_request(request)
    while large.status is RequestStatus.WAITING:
        assert small.status is RequestStatus.WAITING
        core.step()
    run_all(core)
    assert (first.num_output_tokens, large.num_output_tokens, small.num_output_tokens) == (30, 5, 5)


@pytest.mark.parametrize("priorities", list(itertools.permutations([-1, 0, 5])))
def test_smaller_priorities_start_first_and_equal_ones_as_they_came(priorities: tuple[int, ...]) -> None:
    case = Recorder(policy="priority", max_num_seqs=1)
    requests = [
        make_request(f"{priority} {turn}", range(100 * i, 100 * i + 20), 3, priority=priority)
        for i, (turn, priority) in enumerate(itertools.product(range(2), priorities))
    ]
    case.run(requests)
    started = sorted((request.request_id for request in requests), key=case.first_step)
    assert started == ["-1 0", "-1 1", "0 0", "0 1", "5 0", "5 1"]
    case.assert_right(*requests)


def test_priorities_mean_nothing_to_first_come_first_served() -> None:
    case = Recorder(max_num_seqs=1)
    case.run([make_request(f"r{i}", range(100 * i, 100 * i + 20), 3, priority=-i) for i in range(4)])
    assert [case.first_step(f"r{i}") for i in range(4)] == sorted(case.first_step(f"r{i}") for i in range(4))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_last_in_order_is_preempted_and_comes_back_first(policy: str) -> None:
    config = CacheConfig()
    layout = make_cut("as", [1, 1])
    need = layout_alone(layout, config, max_model_len=120, budget=64)
    core = make_core(layout.with_slabs(need + 4), config, max_model_len=120, budget=64, policy=policy)
    priorities = {"a": 2, "b": 0, "c": 1, "d": 1}
    requests = [
        make_request(name, range(1000 * i, 1000 * i + 30), 60, priority=priority)
        for i, (name, priority) in enumerate(priorities.items())
    ]
    for request in requests:
        core.add_request(request)
    order = ["b", "c", "d", "a"] if policy == "priority" else ["a", "b", "c", "d"]
    for _ in range(10 * STALL_STEPS):
        if not core.has_unfinished_requests:
            break
        before = {request.request_id for request in core.scheduler.running}
        core.step()
        running = [request.request_id for request in core.scheduler.running]
        assert running == sorted(running, key=order.index)
        waiting = [request.request_id for request in core.scheduler.waiting]
        assert waiting == sorted(waiting, key=order.index)
        lost = [name for name in waiting if name in before]
        assert all(order.index(name) > order.index(kept) for name in lost for kept in running)
    finished = sorted(requests, key=lambda request: request.finish_time or 0.0)
    assert [request.request_id for request in finished] == order
    assert finished[0].num_preemptions == 0
    assert core.stats()["num_preemptions"] > 0


def test_long_prompts_do_not_hold_up_who_decodes_before_them() -> None:
    case = Recorder(budget=32)
    decoding = make_request("decoding", range(20), 30)
    case.run([decoding], steps=2)
    case.add(make_request("long", range(1000, 1500), 1))
    start = decoding.num_output_tokens
    case.run(steps=10)
    assert decoding.num_output_tokens == start + 10


def test_a_preempted_request_resumes_behind_what_it_published() -> None:
    case = Recorder(budget=32)
    request = make_request("r", range(200), 3)
    case.run([request], steps=4)
    assert request.num_computed_tokens == 128
    case.core.scheduler._preempt(request)
    case.run()
    assert case.steps[4] == {"r": (128, 160)}
    case.assert_right(request)
    assert case.num_computed(request) == 200 + 2


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match="scheduling_policy must be 'fcfs' or 'priority', got 'lifo'"):
        Recorder(policy="lifo")


@pytest.mark.parametrize(
    ("name", "value"), [("max_model_len", 0), ("budget", 0), ("max_num_seqs", -1), ("prefix_wait_steps", -1)]
)
def test_a_limit_that_allows_nothing_is_refused_by_name(name: str, value: int) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(OptionError, match=rf"must be an integer of at least \d, got {value}"):
        Recorder(**options)
