"""Hand-offs: made only for somebody, of exactly what the index vouches for, pinned until given back."""

from collections.abc import Iterable

import pytest

from dalsegno.config import CacheConfig
from dalsegno.kv.hand_off import HandOff, HandOffEntry
from dalsegno.kv.verify import census
from dalsegno.request import Request
from dalsegno.testing.builders import make_layout
from tests.kv.driver import Driver

UNIT = 16


class Sink:
    """A connector that saves what it is asked about, except for requests it was told not to.

    Attributes:
        stored: per group, tokens from the prompt's beginning that are known stored.
    """

    def __init__(self, saves: bool = True) -> None:
        self._saves = saves
        self.stored: dict[int, int] = {}

    def saves(self, request: Request, boundary: int) -> bool:
        return self._saves

    def forget_prefix(self, request: Request) -> None:
        pass

    def first_needed(self, request: Request, group_id: int, boundary: int, listed: int) -> int:
        return min(boundary, max(self.stored.get(group_id, 0), listed))


def driver(kinds: str = "as", sink: Sink | None = None, *, block_size: int = 2 * UNIT, caching: bool = True) -> Driver:
    config = CacheConfig(block_size=block_size, enable_prefix_caching=caching)
    case = Driver(make_layout(kinds, config, num_slabs=200, window=40), config)
    if sink is not None:
        case.manager.bind_connector(sink)
    return case


def prefill(case: Driver, n: int, chunk: int | None = None) -> Request:
    request = case.new("r", range(n))
    assert case.admit(request, chunk)
    case.step({request: chunk or n})
    return request


def by_group(entries: list[HandOffEntry]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for group, _, boundary in entries:
        groups.setdefault(group, []).append(boundary)
    return groups


def entries_of(hand_offs: Iterable[HandOff]) -> list[HandOffEntry]:
    return [entry for hand_off in hand_offs for entry in hand_off.entries]


def release(case: Driver, entries: list[HandOffEntry]) -> None:
    case.manager.pins.unpin([(group, block) for group, block, _ in entries])


def taken(case: Driver) -> list[HandOffEntry]:
    return entries_of(hand_off for made in case.manager.take_partial_tail_offloads().values() for hand_off in made)


@pytest.mark.parametrize("why", ["no connector", "not saved", "caching off"])
def test_nothing_is_made_or_pinned_when_nobody_saves_it(why: str) -> None:
    case = driver(sink=None if why == "no connector" else Sink(saves=why != "not saved"), caching=why != "caching off")
    request = prefill(case, 70)
    assert case.manager.take_partial_tail_offloads() == {}
    assert not case.manager.pins.counts
    case.manager.publish_last_state(request, finished=True)
    assert not case.manager.finalize_partial_tail_offloads(request)
    case.manager.free(request)
    census(case.manager)


@pytest.mark.parametrize(
    ("kinds", "n", "expected"),
    [
        # (first step of 70 tokens) boundary 64: two full blocks, and the state for it.
        ("as", 70, {0: [32, 64], 1: [64]}),
        # Boundary 48: one full block and the partial one.
        ("as", 63, {0: [32, 48], 1: [48]}),
        # 48 and 64: an extension resumes at the end, a resend before it.
        ("as", 64, {0: [32, 48, 64], 1: [48, 64]}),
        ("a", 63, {0: [32, 48]}),
        # A window of 40 tokens before 112 starts at 73.
        ("w", 120, {0: [96, 112]}),
        ("aws", 120, {0: [32, 64, 96, 112], 1: [96, 112], 2: [112]}),
        ("s", 63, {0: [48]}),
    ],
)
def test_a_prompt_hands_off_every_group_of_its_tail(kinds: str, n: int, expected: dict[int, list[int]]) -> None:
    """Also a model without state groups hands off its attention tail."""
    case = driver(kinds, Sink())
    prefill(case, n)
    assert by_group(taken(case)) == expected


def test_a_hand_off_names_the_blocks_the_index_vouches_for_and_pins_each() -> None:
    case = driver(sink=Sink())
    request = prefill(case, 63)
    for group, block, boundary in taken(case):
        assert block == case.manager.index.find(group, request.root_hash, request.block_hashes, boundary)
        assert case.manager.pins.counts[group, block] == 1
    case.check()


def test_hand_offs_are_given_out_once() -> None:
    case = driver(sink=Sink())
    request = prefill(case, 70)
    assert set(case.manager.take_partial_tail_offloads()) == {"r"}
    assert case.manager.take_partial_tail_offloads() == {}
    assert not case.manager.finalize_partial_tail_offloads(request)


def test_what_a_request_that_ends_leaves_behind_is_given_out_once() -> None:
    """A producer of one token: its tail is there in the very step that ends it."""
    case = driver(sink=Sink())
    request = prefill(case, 40)
    case.manager.publish_last_state(request, finished=True)
    assert by_group(entries_of(case.manager.finalize_partial_tail_offloads(request))) == {0: [32], 1: [32]}
    assert not case.manager.finalize_partial_tail_offloads(request)


def test_an_answer_is_handed_off_when_the_request_ends() -> None:
    case = driver(sink=Sink())
    request = prefill(case, 40)
    taken(case)
    while request.num_computed_tokens < 90:
        case.compute(request)
        assert case.manager.take_partial_tail_offloads() == {}, "an answer's state is private until the end"
    case.manager.publish_last_state(request, finished=True)
    assert by_group(entries_of(case.manager.finalize_partial_tail_offloads(request))) == {0: [32, 64, 80], 1: [80]}


def test_a_preempted_request_hands_nothing_off() -> None:
    case = driver(sink=Sink())
    request = prefill(case, 100, chunk=48)
    case.preempt(request)
    assert case.manager.take_partial_tail_offloads() == {}
    census(case.manager)


def test_what_is_not_known_stored_is_handed_off_again_and_so_is_a_grown_tail() -> None:
    case = driver(sink=Sink())
    request = case.new("r", range(100), checkpoint_at=(48,))
    assert case.admit(request, 48)
    case.step({request: 48})
    assert by_group(taken(case)) == {0: [32, 48], 1: [48]}
    case.compute(request)
    assert by_group(taken(case)) == {0: [32, 64, 96], 1: [96]}


def test_what_is_known_stored_is_left_out() -> None:
    sink = Sink()
    case = driver(sink=sink)
    request = prefill(case, 40)
    release(case, taken(case))
    case.finish(request)
    sink.stored[0] = sink.stored[1] = 32
    again = case.new("again", [*range(40), *range(500, 530)])
    assert case.admit(again)
    case.step({again: 38})
    assert by_group(taken(case)) == {0: [64], 1: [64]}


def test_a_boundary_that_is_hit_is_handed_off_unless_it_is_known_stored() -> None:
    """It may have left the store, or never have entered it."""
    sink = Sink()
    case = driver(sink=sink)
    request = prefill(case, 40)
    release(case, taken(case))
    case.finish(request)
    again = case.new("again", list(range(40)))
    assert case.admit(again)
    case.step({again: 8})
    assert by_group(taken(case)) == {0: [32], 1: [32]}


def test_pins_outlive_the_request_and_end_with_their_release() -> None:
    case = driver(sink=Sink())
    request = prefill(case, 70)
    entries = taken(case)
    case.finish(request)
    assert all(case.manager.pool.num_references(group, block) == 1 for group, block, _ in entries)
    case.check()
    assert case.manager.reset_prefix_cache()
    assert all(case.manager.pool.num_references(group, block) == 1 for group, block, _ in entries), "a reset took a pin"
    release(case, entries[:1])
    release(case, entries[1:])
    census(case.manager)


def test_pins_nobody_took_end_with_the_request() -> None:
    case = driver(sink=Sink())
    case.finish(prefill(case, 70))
    census(case.manager)


def test_a_pin_is_not_given_back_twice() -> None:
    case = driver(sink=Sink())
    prefill(case, 70)
    entries = taken(case)
    release(case, entries)
    with pytest.raises(AssertionError, match="has no pin"):
        release(case, entries)


def test_a_boundary_some_group_cannot_restore_is_not_handed_off() -> None:
    case = driver(sink=Sink())
    request = prefill(case, 70)
    taken(case)
    state = case.manager.index.find_state(request.block_hashes[3])
    case.manager.pool.unpublish(1, state)
    assert case.manager.hand_offs.make(request, 64, 0) is None


@pytest.mark.parametrize("kinds", ["a", "as", "aws"])
@pytest.mark.parametrize("common", range(0, 7 * UNIT, UNIT))
def test_a_block_in_which_another_chain_goes_on_is_not_handed_off_for_this_one(kinds: str, common: int) -> None:
    """A hand-off that is made later, of a request that has ended, finds whatever the index has by then."""
    case = driver(kinds, Sink(), block_size=4 * UNIT)
    other = prefill(case, 6 * UNIT + 3)
    release(case, taken(case))
    gone = case.new("gone", [*range(common), *range(5000, 5000 + 7 * UNIT - common)])
    case.manager.publisher.extend_hashes(gone)
    assert case.manager.hand_offs.make(gone, 7 * UNIT, 0) is None
    same = case.new("same", range(6 * UNIT))
    case.manager.publisher.extend_hashes(same)
    made = case.manager.hand_offs.make(same, 6 * UNIT, 0)
    assert made is not None
    case.manager.pins.unpin(made.blocks())
    case.manager.free(other)
    census(case.manager)


def test_a_frozen_block_that_is_handed_off_is_not_written_again() -> None:
    """The pin makes the successor a need: the freeze can no longer be taken back."""
    case = driver(sink=Sink())
    request = prefill(case, 64)
    entries = taken(case)
    frozen = next(block for group, block, boundary in entries if (group, boundary) == (1, 64))
    assert case.manager.allocate_slots(request, 1) is not None
    step = case.manager.state_step(request)
    assert step is not None
    assert (step.read_block, step.write_block == frozen) == (frozen, False)
    case.step({request: 1})
    case.check()
