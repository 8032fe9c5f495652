"""Every token of a prompt is either resumed or lost for a reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.hit_report import HitReport, LostReason, lost_tokens

REASONS = st.sampled_from(list(LostReason))


@given(st.integers(1, 200), st.integers(1, 20), st.data(), REASONS, REASONS)
def test_boundary_and_lost_tokens_add_up_to_the_prompt(
    n: int, unit: int, data: st.DataObject, inside: LostReason, beyond: LostReason
) -> None:
    boundary = unit * data.draw(st.integers(0, (n - 1) // unit))
    covered = unit * data.draw(st.integers(0, n // unit + 2))
    lost = lost_tokens(n, unit, boundary, covered, inside, beyond)
    assert boundary + sum(lost.values()) == n
    assert all(tokens > 0 for tokens in lost.values())


@pytest.mark.parametrize(
    ("n", "boundary", "covered", "expected"),
    [
        (1, 0, 0, {"shorter_than_unit": 1}),
        (16, 0, 0, {"shorter_than_unit": 16}),
        (17, 0, 0, {"new": 16, "sub_unit": 1}),
        (17, 16, 16, {"sub_unit": 1}),
        (32, 16, 16, {"last_token": 16}),
        (100, 0, 0, {"new": 96, "sub_unit": 4}),
        (100, 32, 64, {"no_boundary_state": 32, "new": 32, "sub_unit": 4}),
        (100, 32, 96, {"no_boundary_state": 64, "sub_unit": 4}),
        (96, 32, 96, {"no_boundary_state": 48, "last_token": 16}),
    ],
)
def test_lost_tokens_are_charged_to_the_first_thing_that_stopped_them(
    n: int, boundary: int, covered: int, expected: dict[str, int]
) -> None:
    assert lost_tokens(n, 16, boundary, covered, LostReason.NO_BOUNDARY_STATE, LostReason.NEW) == expected


def test_one_reason_on_both_sides_is_counted_once() -> None:
    lost = lost_tokens(100, 16, 32, 64, LostReason.EVICTED, LostReason.EVICTED)
    assert lost == {"evicted": 64, "sub_unit": 4}


def test_a_shortened_hit_charges_the_difference_and_still_adds_up() -> None:
    report = HitReport(64, {"attention": 64}, {"device": 64}, {"sub_unit": 3, "no_room": 1})
    report.shorten(16, LostReason.NO_ROOM)
    assert (report.boundary, report.cached_by_tier, report.lost) == (16, {"device": 16}, {"sub_unit": 3, "no_room": 49})
    report.shorten(16, LostReason.NO_ROOM)
    report.shorten(0, LostReason.LOAD_FAILED)
    assert report.cached_by_tier == {}
    assert report.boundary + sum(report.lost.values()) == 68


def test_a_hit_cannot_be_made_longer_by_shortening_it() -> None:
    with pytest.raises(AssertionError):
        HitReport(16).shorten(32, LostReason.NO_ROOM)
