"""Which states of a prompt are planned: every promise of the policy, by example and as a property."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.config import CacheConfig
from dalsegno.prefix.checkpoints import checkpoint_boundaries, prompt_state_budget

H = 16


def plan(
    n: int,
    *,
    known: int | None = None,
    hit: int = 0,
    junction: int | None = None,
    marks: Sequence[int] = (),
    **config: Any,
) -> tuple[int, ...]:
    config = {"decode_checkpoint_interval": 0, **config}
    return checkpoint_boundaries(n, n if known is None else known, hit, junction, marks, CacheConfig(**config))


@pytest.mark.parametrize(
    ("n", "expected"), [(1, ()), (15, ()), (16, (16,)), (17, (16,)), (32, (16, 32)), (33, (32,)), (100, (96,))]
)
def test_tails_serve_a_resend_and_an_extension(n: int, expected: tuple[int, ...]) -> None:
    assert plan(n) == expected


def test_a_preempted_request_keeps_the_end_of_what_it_knows_and_of_its_prompt() -> None:
    assert plan(64, known=100, hit=32) == (96, 64)
    assert plan(64, known=112, hit=32) == (96, 112, 64)
    assert plan(70, known=100, hit=32) == (96,)


def test_a_junction_is_kept_behind_the_tails() -> None:
    assert plan(100, junction=48) == (96, 48)
    assert plan(100, junction=96) == (96,)


def test_the_first_mark_comes_before_the_last_ones() -> None:
    assert plan(200, marks=(35, 64, 100, 130)) == (192, 32, 128, 96, 64)


def test_marks_are_floored_and_those_beyond_the_prompt_mean_nothing() -> None:
    assert plan(100, marks=(15, 33, 47, 101, 160)) == (96, 32)
    assert plan(100, known=170, hit=96, marks=(101, 165)) == (160,)


def test_an_interval_keeps_the_latest_boundaries_first() -> None:
    assert plan(200, prefix_cache_retention_interval=64) == (192, 128, 64)
    assert plan(200, prefix_cache_retention_interval=H, max_states_per_request=4) == (192, 176, 160, 144)


def test_the_order_is_tails_junction_first_mark_last_marks_interval() -> None:
    expected = (240, 256, 128, 32, 208, 112, 192, 64)
    found = plan(256, junction=128, marks=(32, 112, 208), prefix_cache_retention_interval=64)
    assert found == expected
    for places in range(len(expected)):
        shorter = plan(
            256, junction=128, marks=(32, 112, 208), prefix_cache_retention_interval=64, max_states_per_request=places
        )
        assert shorter == expected[:places]


def test_nothing_up_to_the_hit_is_planned_again() -> None:
    assert plan(100, hit=96, junction=64, marks=(32,)) == ()
    assert plan(112, hit=96, junction=64, marks=(32, 105)) == (112,)


@pytest.mark.parametrize(
    ("places", "interval", "expected"), [(16, 16, 15), (3, 16, 2), (3, 0, 3), (2, 16, 2), (1, 16, 1), (0, 16, 0)]
)
def test_one_place_is_left_for_the_answer_where_there_are_more_than_two(
    places: int, interval: int, expected: int
) -> None:
    config = CacheConfig(max_states_per_request=places, decode_checkpoint_interval=interval)
    assert prompt_state_budget(config) == expected


@st.composite
def admissions(draw: st.DrawFn) -> tuple[int, int, int, int | None, list[int], CacheConfig]:
    unit = draw(st.integers(1, 20))
    n = draw(st.integers(1, 300))
    known = n + draw(st.integers(0, 100))
    hit = draw(st.integers(0, (known - 1) // unit)) * unit
    junction = draw(st.none() | st.integers(hit // unit, (known - 1) // unit).map(lambda count: count * unit))
    marks = draw(st.lists(st.integers(1, 400), max_size=8))
    config = CacheConfig(
        block_size=unit,
        hash_block_size=unit,
        prefix_cache_retention_interval=unit * draw(st.integers(0, 4)),
        decode_checkpoint_interval=unit * draw(st.integers(0, 2)),
        max_states_per_request=draw(st.integers(0, 20)),
    )
    return n, known, hit, junction, marks, config


@given(admissions())
def test_a_plan_is_distinct_boundaries_in_range_and_within_the_budget(
    admission: tuple[int, int, int, int | None, list[int], CacheConfig],
) -> None:
    n, known, hit, junction, marks, config = admission
    planned = checkpoint_boundaries(n, known, hit, junction, marks, config)
    assert len(set(planned)) == len(planned) <= prompt_state_budget(config)
    assert all(hit < boundary <= known and boundary % config.hash_block_size == 0 for boundary in planned)


@given(admissions())
def test_a_plan_is_a_pure_function_of_the_admission(
    admission: tuple[int, int, int, int | None, list[int], CacheConfig],
) -> None:
    """SCENARIOS 93: whoever derives the stops of a request derives the same ones."""
    before = deepcopy(admission)
    first = checkpoint_boundaries(*admission)
    assert admission == before
    n, known, hit, junction, marks, config = admission
    assert checkpoint_boundaries(n, known, hit, junction, tuple(reversed(marks)) * 2, config) == first


@given(admissions())
def test_a_smaller_budget_keeps_the_most_valuable_boundaries(
    admission: tuple[int, int, int, int | None, list[int], CacheConfig],
) -> None:
    n, known, hit, junction, marks, config = admission
    interval, unit = config.prefix_cache_retention_interval, config.hash_block_size
    all_of_them = checkpoint_boundaries(
        n, known, hit, junction, marks, CacheConfig(unit, unit, True, interval, 0, max_states_per_request=1000)
    )
    planned = checkpoint_boundaries(n, known, hit, junction, marks, config)
    assert planned == all_of_them[: prompt_state_budget(config)]


@given(admissions())
def test_every_promise_is_in_an_unbounded_plan(
    admission: tuple[int, int, int, int | None, list[int], CacheConfig],
) -> None:
    n, known, hit, junction, marks, config = admission
    unit, interval = config.hash_block_size, config.prefix_cache_retention_interval
    promised = {(known - 1) // unit * unit}
    promised |= {end for end in (n, known) if end % unit == 0}
    promised |= {junction} if junction is not None else set()
    promised |= {mark // unit * unit for mark in marks if mark <= n}
    promised |= set(range(interval, known + 1, interval)) if interval else set()
    planned = checkpoint_boundaries(
        n, known, hit, junction, marks, CacheConfig(unit, unit, True, interval, 0, max_states_per_request=1000)
    )
    assert set(planned) == {boundary for boundary in promised if boundary > hit}
