"""The lookup in a store finds the longest boundary that device and store can restore together, and nothing longer."""

from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.kv.layout import MemoryLayout
from dalsegno.testing.builders import make_cut
from tests.connector.lookup_oracle import Key, Prefix

H = 16


def cut(kinds: str, block_size: int, **options: object) -> MemoryLayout:
    return make_cut(kinds, [1] * len(kinds), block_size=block_size, hash_block_size=H, **options)  # type: ignore[arg-type]


def keys_of(layout: MemoryLayout, num_tokens: int) -> list[Key]:
    return [(group.group_id, end) for group in layout.groups for end in range(H, num_tokens + 1, H)]


def check(prefix: Prefix, stored: set[Key]) -> None:
    match = prefix.find()
    assert (match.boundary if match is not None else 0) == prefix.best(stored), (stored, prefix)
    if match is not None:
        prefix.check(match, stored)


# 41, R3.


@pytest.mark.parametrize(("num_tokens", "boundary"), [(63, 32), (64, 48), (65, 48), (49, 32), (48, 32), (33, 32)])
def test_an_object_vouches_for_every_boundary_inside_it_to_who_knows_its_hash(num_tokens: int, boundary: int) -> None:
    """41: B = 32, attention {32, 64}, states {32, 48}."""
    prefix = Prefix(cut("as", 32), H, 32, num_tokens, {(0, 32), (0, 64), (1, 32), (1, 48)})
    match = prefix.find()
    assert match is not None
    assert match.boundary == boundary
    assert {(item.group_id, item.boundary) for item in match.objects} == (
        {(0, 32), (0, 64), (1, 48)} if boundary == 48 else {(0, 32), (1, 32)}
    )


@pytest.mark.parametrize("num_tokens", [63, 64, 65])
@pytest.mark.parametrize(("kinds", "block_size", "size"), [("aws", 16, 16), ("aws", 32, 64), ("aas", 16, 32)])
def test_every_subset_of_keys_gives_what_trying_every_boundary_gives(
    kinds: str, block_size: int, size: int, num_tokens: int
) -> None:
    """41: three groups, four boundaries, 2^12 subsets (2^9 below a boundary that the prompt does not know)."""
    layout = cut(kinds, block_size)
    keys = keys_of(layout, num_tokens)
    subsets = chain.from_iterable(combinations(keys, count) for count in range(len(keys) + 1))
    for subset in subsets:
        check(Prefix(layout, H, size, num_tokens, set(subset)), set(subset))


@st.composite
def prefixes(draw: st.DrawFn, max_units: int = 20) -> Prefix:
    block_size = draw(st.sampled_from([16, 32, 48, 64]))
    kinds = draw(st.sampled_from(["a", "s", "w", "as", "ws", "aw", "aws", "aas", "aww"]))
    options = {"window": draw(st.sampled_from([1, 17, 40, 100]))}
    modes = draw(st.sampled_from([{}, {}, {}, {"a": "block"}, {"w": "block"}, {"w": "none"}, {"s": "none"}]))
    layout = cut(kinds, block_size, prefix=modes, **options)
    num_tokens = draw(st.integers(1, max_units * H))
    keys = keys_of(layout, num_tokens)
    unstored = draw(st.sets(st.sampled_from(keys), max_size=12)) if keys else set()
    dense = draw(st.booleans())
    stored = set(keys) - unstored if dense else draw(st.sets(st.sampled_from(keys))) if keys else set()
    prefix = Prefix(layout, H, block_size * draw(st.integers(1, 4)), num_tokens, stored)
    prefix.reach = {
        group.group_id: draw(st.integers(0, num_tokens // H)) * H
        for group in layout.groups
        if group.kind.value == "attention"
    }
    others = [key for key in keys if key[0] not in prefix.reach]
    prefix.held = draw(st.sets(st.sampled_from(others), max_size=6)) if others else set()
    prefix.local_boundary = prefix.best(set())
    prefix.excluded = draw(st.sets(st.sampled_from(keys), max_size=3)) if keys else set()
    prefix.predicted = draw(st.lists(st.integers(0, num_tokens), max_size=3))
    return prefix


@given(prefixes())
@settings(max_examples=400)
def test_random_holes_and_local_parts_give_what_trying_every_boundary_gives(prefix: Prefix) -> None:
    """41, 56: what the device has is not read; what has failed before is not asked for."""
    check(prefix, set(prefix.stored))


@given(prefixes(), st.data())
@settings(max_examples=200)
def test_what_vanishes_after_it_was_asked_for_is_never_read(prefix: Prefix, drawn: st.DataObject) -> None:
    """65: keys go missing between the question and the confirmation, in any order."""
    there = set(prefix.stored)
    prefix.vanishing = drawn.draw(st.sets(st.sampled_from(sorted(there)), max_size=8)) if there else set()
    match = prefix.find()
    left = there - set(prefix.vanishing)
    assert prefix.best(left) <= (match.boundary if match else 0) <= prefix.best(there)
    if match is not None:
        prefix.check(match, prefix.stored | prefix.confirmed)


@given(prefixes(), st.integers(1, 6))
def test_with_few_probes_the_match_may_be_shorter_but_never_wrong(prefix: Prefix, probes: int) -> None:
    stored = set(prefix.stored)
    match = prefix.find(max_state_probes=probes)
    states = {group.group_id for group in prefix.layout.groups if group.is_state}
    asked = {key for question in prefix.asked for key in question if key[0] in states}
    assert len(asked) <= probes
    if match is not None:
        assert match.boundary <= prefix.best(stored)
        prefix.check(match, stored)


# 42, 45: never at the prompt's end.


def test_a_full_hit_lands_on_a_boundary_that_is_stored() -> None:
    """42: 64 tokens, everything stored up to 64, states at 32 and 64: 32, not 48."""
    prefix = Prefix(cut("as", 64), H, 64, 64, {(0, 64), (1, 64), (1, 32)})
    match = prefix.find()
    assert match is not None
    assert match.boundary == 32
    assert len(prefix.asked) <= 4
    assert len([key for question in prefix.asked for key in question]) <= 10


@pytest.mark.parametrize(("num_tokens", "boundary"), [(64, None), (65, 64)])
def test_the_state_at_the_prompts_end_serves_an_extension_only(num_tokens: int, boundary: int | None) -> None:
    """45"""
    match = Prefix(cut("as", 32), H, 32, num_tokens, {(0, 32), (0, 64), (1, 64)}).find()
    assert (match.boundary if match else None) == boundary


# 56: local against stored.


@pytest.mark.parametrize(("local", "stored", "found"), [(48, 32, None), (48, 48, None), (48, 64, 64), (0, 64, 64)])
def test_only_what_is_beyond_the_local_hit_counts(local: int, stored: int, found: int | None) -> None:
    """56"""
    prefix = Prefix(cut("as", 16), H, 16, 81, {(0, end) for end in range(H, 81, H)} | {(1, stored)})
    prefix.reach, prefix.held, prefix.local_boundary = {0: local}, {(1, local)} if local else set(), local
    match = prefix.find()
    assert (match.boundary if match else None) == found
    if match is not None:
        starts = [item.first_token for item in match.objects if item.group_id == 0]
        assert starts == list(range(local, 64, H))


def test_where_the_device_has_all_attention_a_stored_state_is_all_that_is_read() -> None:
    prefix = Prefix(cut("as", 32), H, 64, 130, {(0, 64), (0, 128), (1, 96)})
    prefix.reach = {0: 96}
    match = prefix.find()
    assert match is not None
    assert [(item.group_id, item.boundary) for item in match.objects] == [(1, 96)]


# The number of questions.


@pytest.mark.parametrize("num_objects", [0, 1, 7, 8, 9, 100, 1000])
def test_an_absent_tail_costs_no_more_questions_than_there_are_objects(num_objects: int) -> None:
    """Galloping: keys asked are bounded by a multiple of the hit, not by the prompt."""
    size = 16 * H
    layout = cut("a", 64)
    stored = {(0, end) for end in range(size, num_objects * size + 1, size)}
    prefix = Prefix(layout, H, size, 3000 * size + 1, set(stored))
    match = prefix.find()
    assert (match.boundary if match else 0) == num_objects * size
    asked = sum(map(len, prefix.asked))
    assert asked <= 3 * num_objects + 8 + 2 * size // H + 1
    assert len(prefix.asked) <= 12


def test_states_are_asked_for_only_below_what_attention_reaches_predicted_ones_first() -> None:
    size = 4 * H
    layout = cut("as", H)
    stored = {(0, end) for end in range(size, 40 * size + 1, size)} | {(1, 37 * H)}
    prefix = Prefix(layout, H, size, 1000 * size, set(stored), predicted=(37 * H + 5, 900 * size))
    match = prefix.find()
    assert match is not None
    assert match.boundary == 37 * H
    states = [key for question in prefix.asked for key in question if key[0] == 1]
    assert states[0] == (1, 37 * H)
    assert max(end for _, end in states) <= 40 * size + size


@pytest.mark.parametrize("probes", [1, 5, 64, 256])
def test_a_lookup_asks_at_no_more_boundaries_for_states_than_it_may(probes: int) -> None:
    size = 16 * H
    stored = {(0, end) for end in range(size, 100 * size + 1, size)}
    prefix = Prefix(cut("as", H), H, size, 100 * size + 1, set(stored), predicted=(H, 5 * H))
    assert prefix.find(probes) is None
    states = [key for question in prefix.asked for key in question if key[0] == 1]
    assert len(states) == len(set(states)) <= probes
