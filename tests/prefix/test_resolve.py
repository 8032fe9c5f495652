"""`resolve` against the definition, over every set of keys of small shapes."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.prefix.resolve import Contains, resolve, window_first_block
from dalsegno.testing.builders import GROUP_KINDS
from dalsegno.testing.oracles import boundary_by_definition, can_restore
from dalsegno.types import GroupKind

UNIT = 4
NUM_BOUNDARIES = 4


@dataclass(frozen=True)
class Group:
    """What `resolve` wants to know of a group."""

    kind: GroupKind
    block_size: int
    window: int | None = None
    prefix: str = "fine"

    @property
    def name(self) -> str:
        return f"{self.kind.value} {self.prefix} {self.block_size}"


def make_group(letter: str, block_size: int, window: int = 0, prefix: str = "fine") -> Group:
    return Group(GROUP_KINDS[letter], block_size, window if letter == "w" else None, prefix)


def tier(groups: Sequence[Group], keys: Sequence[frozenset[int]], num_tokens: int, unit: int = UNIT) -> Contains:
    """A tier with one object per key, for a prompt of `num_tokens` tokens, which knows no hash beyond its last unit."""
    known = num_tokens - num_tokens % unit

    def contains(group: int, block_index: int, boundary: int) -> bool:
        if groups[group].kind is GroupKind.STATE:
            return boundary in keys[group]
        # Append-only: an object vouches for every boundary of its block up to its own.
        end = min(known, (block_index + 1) * groups[group].block_size)
        return any(boundary <= key <= end for key in keys[group])

    return contains


def subsets(boundaries: Iterable[int]) -> Iterator[frozenset[int]]:
    boundaries = list(boundaries)
    for count in range(len(boundaries) + 1):
        yield from map(frozenset, itertools.combinations(boundaries, count))


def assert_resolves_by_definition(groups: Sequence[Group], limit: int, contains: Contains, unit: int = UNIT) -> None:
    resolution = resolve(groups, unit, limit, contains)
    assert resolution.boundary == boundary_by_definition(groups, unit, limit, contains)
    for index, one in enumerate(groups):
        if one.prefix == "fine" and all(other.prefix != "block" for other in groups):
            alone = [p for p in range(0, limit + 1, unit) if can_restore(index, one, p, contains)]
            assert resolution.by_group[one.name] == alone[-1]


@pytest.mark.parametrize(
    ("n", "expected"),
    [(65, 48), (64, 48), (63, 32), (49, 32), (33, 32), (32, 0)],
)
def test_a_longer_attention_object_vouches_for_a_shorter_boundary_only_if_its_hash_is_known(
    n: int, expected: int
) -> None:
    """The example of DESIGN R3: B=32, attention {32, 64}, states {32, 48}; and SCENARIOS 41."""
    groups = [make_group("a", 32), make_group("s", 16)]
    keys = [frozenset({32, 64}), frozenset({32, 48})]
    contains = tier(groups, keys, n, unit=16)
    assert resolve(groups, 16, n - 1, contains).boundary == expected


@pytest.mark.parametrize("block_size", [UNIT, 2 * UNIT, 4 * UNIT])
@pytest.mark.parametrize("kinds", ["a", "s", "as"])
def test_attention_and_state_resolve_by_definition_for_every_set_of_keys(kinds: str, block_size: int) -> None:
    groups = [make_group(kind, block_size if kind == "a" else UNIT) for kind in kinds]
    boundaries = range(UNIT, NUM_BOUNDARIES * UNIT + 1, UNIT)
    for keys in itertools.product(*(list(subsets(boundaries)) for _ in groups)):
        for n in range(1, NUM_BOUNDARIES * UNIT + 2):
            assert_resolves_by_definition(groups, n - 1, tier(groups, keys, n))


@pytest.mark.parametrize("window", [2, 3, UNIT, UNIT + 1, 2 * UNIT + 1, 100])
@pytest.mark.parametrize("block_size", [UNIT, 2 * UNIT, 4 * UNIT])
@pytest.mark.parametrize("kinds", ["w", "aws"])
def test_windows_resolve_by_definition_for_every_set_of_keys(
    kinds: str, block_size: int, window: int, long: bool
) -> None:
    groups = [make_group(kind, UNIT if kind == "s" else block_size, window) for kind in kinds]
    boundaries = range(UNIT, NUM_BOUNDARIES * UNIT + 1, UNIT)
    lengths = range(1, NUM_BOUNDARIES * UNIT + 2) if long else [2 * UNIT + 1, 4 * UNIT, 4 * UNIT + 1]
    for keys in itertools.product(*(list(subsets(boundaries)) for _ in groups)):
        for n in lengths:
            assert_resolves_by_definition(groups, n - 1, tier(groups, keys, n))


@pytest.mark.parametrize("coarse", ["a", "w"])
def test_one_block_group_makes_every_hit_a_multiple_of_its_block_size(coarse: str) -> None:
    """SCENARIOS 9: hits get coarser, and nothing asserts."""
    groups = [
        make_group("a", 2 * UNIT, prefix="block" if coarse == "a" else "fine"),
        make_group("w", 2 * UNIT, 7, prefix="block" if coarse == "w" else "fine"),
        make_group("s", UNIT),
    ]
    boundaries = range(UNIT, NUM_BOUNDARIES * UNIT + 1, UNIT)
    hits = set()
    for keys in itertools.product(*(list(subsets(boundaries)) for _ in groups)):
        contains = tier(groups, keys, 4 * UNIT + 1)
        hits.add(resolve(groups, UNIT, 4 * UNIT, contains).boundary)
        assert_resolves_by_definition(groups, 4 * UNIT, contains)
    assert hits == {0, 2 * UNIT, 4 * UNIT}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_group_that_takes_no_part_changes_no_hit_and_is_not_asked(place: int) -> None:
    """SCENARIOS 9: a scratch group that opts out of caching."""
    fine = [make_group("a", 2 * UNIT), make_group("s", UNIT)]
    groups = list(fine)
    groups.insert(place, make_group("w", 8 * UNIT, 3, prefix="none"))
    boundaries = range(UNIT, NUM_BOUNDARIES * UNIT + 1, UNIT)
    for keys in itertools.product(*(list(subsets(boundaries)) for _ in fine)):
        contains = tier(fine, keys, 4 * UNIT + 1)

        def shifted(group: int, block_index: int, boundary: int, contains: Contains = contains) -> bool:
            assert group != place, "a group with prefix none was asked"
            return contains(group - (group > place), block_index, boundary)

        expected = resolve(fine, UNIT, 4 * UNIT, contains)
        found = resolve(groups, UNIT, 4 * UNIT, shifted)
        assert (found.boundary, found.by_group) == (expected.boundary, expected.by_group)


def test_groups_that_take_no_part_alone_have_no_hit() -> None:
    assert resolve([make_group("a", UNIT, prefix="none")], UNIT, 64, lambda *_: True).boundary == 0


shapes = st.sampled_from(["a", "w", "s", "aw", "as", "ws", "aws", "aww", "asw"])


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Group], list[frozenset[int]], int, int]:
    """Larger shapes than can be enumerated: (groups, keys, n, unit)."""
    unit = draw(st.integers(1, 5))
    n = draw(st.integers(1, 80))
    groups = [
        make_group(
            letter,
            unit if letter == "s" else unit * draw(st.integers(1, 6)),
            draw(st.integers(2, 60)),
            draw(st.sampled_from(["fine", "fine", "fine", "block", "none"])),
        )
        for letter in draw(shapes)
    ]
    boundaries = list(range(unit, 90, unit))
    # Mostly full sets with holes: sparse ones hit nothing.
    keys = [frozenset(boundaries) - draw(st.frozensets(st.sampled_from(boundaries), max_size=6)) for _ in groups]
    return groups, keys, n, unit


@given(cases())
def test_resolve_finds_the_boundary_of_the_definition(
    case: tuple[list[Group], list[frozenset[int]], int, int],
) -> None:
    groups, keys, n, unit = case
    contains = tier(groups, keys, n, unit)
    if any(one.prefix != "none" for one in groups):
        assert resolve(groups, unit, n - 1, contains).boundary == boundary_by_definition(groups, unit, n - 1, contains)


def longest(restored: Sequence[int], limit: int, step: int) -> int:
    return max(p for p in restored if p <= limit and p % step == 0)


@given(cases())
def test_what_is_known_without_asking_changes_no_boundary_and_saves_all_questions(
    case: tuple[list[Group], list[frozenset[int]], int, int],
) -> None:
    groups, keys, n, unit = case
    answer = tier(groups, keys, n, unit)
    reach = {
        index: [p for p in range(0, n, unit) if can_restore(index, one, p, answer)]
        for index, one in enumerate(groups)
        if one.kind is not GroupKind.WINDOW
    }

    def contains(group: int, block_index: int, boundary: int) -> bool:
        assert group not in reach, "asked although the answer is known"
        return answer(group, block_index, boundary)

    known = {index: partial(longest, restored) for index, restored in reach.items()}
    assert resolve(groups, unit, n - 1, contains, known) == resolve(groups, unit, n - 1, answer)


@given(cases())
def test_questions_stay_within_the_limit(case: tuple[list[Group], list[frozenset[int]], int, int]) -> None:
    groups, keys, n, unit = case
    answer = tier(groups, keys, n, unit)

    def contains(group: int, block_index: int, boundary: int) -> bool:
        assert 0 < boundary <= n - 1
        assert boundary % unit == 0
        if groups[group].kind is GroupKind.STATE:
            assert block_index == 0
        else:
            assert block_index == (boundary - 1) // groups[group].block_size
        return answer(group, block_index, boundary)

    resolve(groups, unit, n - 1, contains)


@pytest.mark.parametrize("limit", [pytest.param(limit, id=f"limit {limit}") for limit in (-1, 0, UNIT - 1)])
def test_no_room_for_a_unit_is_no_hit(limit: int) -> None:
    never: Callable[..., bool] = lambda *_: pytest.fail("asked although nothing can hit")  # noqa: E731
    assert resolve([make_group("a", 8), make_group("s", 4)], UNIT, limit, never).boundary == 0


@given(st.integers(0, 100), st.integers(1, 60), st.integers(1, 20))
def test_the_first_block_of_a_window_is_that_of_its_first_token(boundary: int, window: int, block_size: int) -> None:
    seen = [token for token in range(boundary) if token > boundary - window]
    first = window_first_block(boundary, window, block_size)
    assert first == (seen[0] // block_size if seen else boundary // block_size)
