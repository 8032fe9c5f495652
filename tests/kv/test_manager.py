"""The KV manager's promises, one by one, over integer memory."""

import pytest

from dalsegno.config import CacheConfig
from dalsegno.kv.manager import KVCacheManager
from dalsegno.kv.verify import census
from dalsegno.testing.builders import make_cut, make_layout
from dalsegno.types import NULL_BLOCK
from tests.kv.driver import Driver, snapshot

UNIT = 16


def driver(kinds: str = "as", *, block_size: int = UNIT, num_slabs: int = 100, **config: int) -> Driver:
    cache_config = CacheConfig(block_size=block_size, **{"decode_checkpoint_interval": UNIT, **config})  # type: ignore[arg-type]
    return Driver(make_layout(kinds, cache_config, num_slabs=num_slabs), cache_config)


# Hits.


@pytest.mark.parametrize("block_size", [UNIT, 2 * UNIT, 4 * UNIT])
@pytest.mark.parametrize("kinds", ["a", "s", "as", "aws"])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100])
def test_a_resend_and_an_extension_hit_what_the_policy_promises(n: int, kinds: str, block_size: int) -> None:
    case = driver(kinds, block_size=block_size)
    tokens = case.serve("r", range(n)).token_ids[:n].tolist()
    assert case.hit(tokens) == (n - 1) // UNIT * UNIT
    assert case.hit([*tokens, 999]) == n // UNIT * UNIT
    assert case.hit([*tokens, *range(900, 990)]) == n // UNIT * UNIT


@pytest.mark.parametrize("interval", [0, UNIT, 3 * UNIT])
@pytest.mark.parametrize("num_answers", [1, 2, 7, 8, 9, 23, 24, 25, 39, 40, 41, 57])
def test_the_next_turn_resumes_at_the_last_kept_boundary_of_the_answer(num_answers: int, interval: int) -> None:
    n = 72
    case = driver(decode_checkpoint_interval=interval)
    tokens = case.serve("r", range(n), num_answers).token_ids.tolist()
    computed = n + num_answers - 1
    last = computed // interval * interval if interval else 0
    assert case.hit([*tokens, 1, 2, 3]) == (last if last > n else 64)


def test_the_third_request_on_a_shared_prefix_hits_it() -> None:
    case = driver()
    shared = list(range(75))
    for sighting in (1, 2):
        prompt = [*shared, *[100 * sighting] * 40]
        assert case.hit(prompt) == 0
        case.serve(f"sighting {sighting}", prompt)
    assert case.hit([*shared, *[300] * 40]) == 64


def test_a_prompt_that_diverges_inside_a_unit_shares_the_units_before_it() -> None:
    case = driver("a", block_size=4 * UNIT)
    case.serve("r", range(100))
    for cut in range(0, 100, 7):
        assert case.hit([*range(cut), *[999] * 30]) == cut // UNIT * UNIT


def test_a_mark_is_worth_a_hit_on_the_second_sighting() -> None:
    case = driver()
    case.serve("first", [*range(50), *[900] * 30], checkpoint_at=(50,))
    assert case.hit([*range(50), *[901] * 30]) == 48


def test_prefixes_of_another_salt_are_never_hit_and_never_told_of() -> None:
    """SCENARIOS 82."""
    case = driver()
    prompt = list(range(70))
    case.serve("r", prompt, cache_salt="a")
    for salt in [None, "b", "A", ""]:
        _, boundary, report = case.manager.get_computed_blocks(case.new("probe", prompt, cache_salt=salt))
        assert boundary == 0
        assert report.lost == {"new": 64, "sub_unit": 6}
        assert set(report.boundary_by_group.values()) == {0}
    _, boundary, _ = case.manager.get_computed_blocks(case.new("probe", prompt, cache_salt="a"))
    assert boundary == 64


def test_caching_off_looks_nothing_up_and_publishes_nothing() -> None:
    case = driver(enable_prefix_caching=False)
    case.serve("r", range(70), 20)
    assert len(case.manager.index) == 0
    _, boundary, report = case.manager.get_computed_blocks(case.new("probe", range(70)))
    assert (boundary, report.lost) == (0, {"caching_off": 70})


# Copies.


@pytest.mark.parametrize("n", [17, 40, 63, 64, 65, 100])
def test_a_hit_inside_a_block_copies_the_vouched_tokens_and_no_more(n: int) -> None:
    case = driver(block_size=4 * UNIT)
    case.serve("first", range(n))
    request = case.new("second", [*range(n), *range(500, 510)])
    assert case.admit(request)
    boundary = request.num_computed_tokens
    assert boundary == n // UNIT * UNIT
    copies = case.manager.take_copies()
    assert [copy.num_tokens for copy in copies] == ([boundary % 64] if boundary % 64 else [])
    for copy in copies:
        assert case.manager.pool.num_references(copy.group_id, copy.source) == 1
        assert copy.target == case.manager.block_tables(request)[copy.group_id][boundary // 64]
    case.manager.end_copies()
    assert all(case.manager.pool.num_references(copy.group_id, copy.source) == 0 for copy in copies)


def test_an_owner_appends_behind_what_a_hit_copies_and_neither_sees_the_other() -> None:
    """R4: the block of a running request is published up to 32 and appended to, while another one resumes at 32."""
    case = driver(block_size=4 * UNIT)
    owner = case.new("owner", range(32))
    assert case.admit(owner)
    case.step({owner: 32})
    other = case.new("other", [*range(32), 7, 8, 9])
    assert case.admit(other)
    assert other.num_computed_tokens == 32
    assert case.manager.allocate_slots(owner, 1) is not None
    case.step({owner: 1, other: 3})
    for _ in range(20):
        assert case.manager.allocate_slots(owner, 1) is not None
        assert case.manager.allocate_slots(other, 1) is not None
        case.step({owner: 1, other: 1})
        case.check()
    case.assert_right_answer(owner)
    case.assert_right_answer(other)


def test_a_full_duplicate_is_dropped_for_the_published_block() -> None:
    case = driver("a")
    left, right = case.new("left", range(40)), case.new("right", range(40))
    assert case.admit(left)
    assert case.admit(right)
    case.step({left: 40, right: 40})
    [of_left], [of_right] = case.manager.block_tables(left), case.manager.block_tables(right)
    assert of_left[:2] == of_right[:2]
    assert of_left[2] != of_right[2], "a tail is nobody else's to write"
    assert [case.manager.pool.num_references(0, block) for block in of_left] == [2, 2, 1]
    case.check()


# States.


def test_a_state_that_is_hit_is_read_and_another_block_is_written() -> None:
    case = driver()
    case.serve("first", range(40))
    request = case.new("second", range(41))
    assert case.admit(request)
    step = case.manager.state_step(request)
    assert step is not None
    assert case.manager.index.is_published(1, step.read_block)
    assert step.write_block not in (step.read_block, NULL_BLOCK)


def test_a_frozen_block_is_read_and_the_next_one_written() -> None:
    case = driver()
    request = case.new("r", range(32))
    assert case.admit(request)
    case.step({request: 32})
    assert case.manager.allocate_slots(request, 1) is not None
    case.manager.grant_write(request)
    step = case.manager.state_step(request)
    assert step is not None
    assert step.read_block == case.manager.index.find_state(request.block_hashes[1])
    assert step.write_block != step.read_block


def test_a_freeze_is_taken_back_when_its_successor_cannot_be_had() -> None:
    """Thaw: three slabs for attention and one for states, so the frozen block is all there is to write."""
    case = Driver(make_cut("as", [1, 1], num_slabs=5))
    request = case.new("r", range(32))
    assert case.admit(request)
    case.step({request: 32})
    frozen = case.manager.index.find_state(request.block_hashes[1])
    kept = request.num_states_kept
    assert case.manager.allocate_slots(request, 1) is not None
    case.step({request: 1})
    assert case.manager.counters["boundary_states_thawed"] == 1
    assert request.hit_report.checkpoints_skipped >= 1
    step_state = case.manager.requests["r"].state
    assert step_state is not None
    assert step_state.current == frozen
    assert not case.manager.index.is_published(1, frozen)
    assert request.num_states_kept == kept - 1
    case.check()
    case.assert_right_answer(request)


def test_a_frozen_block_that_somebody_else_reads_is_not_thawed() -> None:
    case = Driver(make_cut("as", [1, 1], num_slabs=8))
    request = case.new("r", range(32))
    assert case.admit(request)
    case.step({request: 32})
    other = case.new("other", range(33))
    assert case.admit(other)
    # Seven slabs: two of attention and a frozen state, one tail block and one state of the other, two spare.
    assert case.manager.allocate_slots(request, 1) is not None
    before = snapshot(case.manager)
    step = case.manager.state_step(request)
    assert step is not None
    assert step.write_block != step.read_block
    assert snapshot(case.manager) == before
    case.step({request: 1, other: 1})
    case.check()
    case.assert_right_answer(other)


def test_wants_are_refused_before_anything_is_preempted_for_them() -> None:
    """Exactly what the prompt needs: no export finds a block, all are counted, the answer is right."""
    case = Driver(make_cut("as", [1, 1], num_slabs=7))
    request = case.new("r", range(70), checkpoint_at=(16, 32, 48))
    assert case.admit(request)
    case.step({request: 70})
    assert case.manager.counters["checkpoints_skipped"] == 4
    assert request.hit_report.checkpoints_skipped == 4
    case.assert_right_answer(request)


def test_a_preempted_request_resumes_from_its_running_block() -> None:
    case = driver()
    request = case.new("r", range(100))
    assert case.admit(request, 48)
    case.step({request: 48})
    case.preempt(request)
    assert case.admit(request)
    assert request.num_computed_tokens == 48


def test_an_answer_state_is_private_until_the_request_ends() -> None:
    case = driver()
    request = case.new("r", range(20))
    assert case.admit(request)
    case.step({request: 20})
    while request.num_computed_tokens < 50:
        case.compute(request)
        assert case.hit([*request.token_ids.tolist(), 1]) == 16
    case.finish(request)
    assert case.hit([*request.token_ids.tolist(), 1]) == 48


@pytest.mark.parametrize("places", [0, 1, 2, 3, 16])
def test_no_request_publishes_more_states_than_it_may(places: int) -> None:
    case = driver(max_states_per_request=places)
    request = case.serve("r", range(200), 40, checkpoint_at=(20, 60, 99, 130))
    states = len(list(case.manager.index.published(1)))
    assert states == request.num_states_kept == case.manager.counters["boundary_states_published"]
    # Four marks, the tail at 192 and the answer's state at 224.
    assert states == min(places, 6)


# Windows.


@pytest.mark.parametrize("window", [2, 16, 17, 40])
def test_blocks_that_left_the_window_are_given_back(window: int) -> None:
    config = CacheConfig()
    case = Driver(make_cut("aw", [1, 1], num_slabs=60, window=window), config)
    request = case.new("r", range(100))
    assert case.admit(request)
    while request.num_computed_tokens < 150:
        case.step({request: request.num_tokens - request.num_computed_tokens})
        c = request.num_computed_tokens
        _, table = case.manager.block_tables(request)
        first_seen = max(0, c - window + 1) // UNIT
        assert [block != NULL_BLOCK for block in table] == [i >= first_seen for i in range(len(table))]
        assert case.manager.allocate_slots(request, 1) is not None
    case.check()


def test_a_window_hit_needs_only_what_the_window_covers() -> None:
    case = Driver(make_cut("w", [1], num_slabs=60, window=20))
    tokens = case.serve("r", range(100)).token_ids.tolist()
    probe = case.new("probe", tokens)
    blocks = [case.manager.index.find(0, probe.root_hash, probe.block_hashes, i * UNIT) for i in range(1, 6)]
    for block in blocks[:4]:
        case.manager.pool.unpublish(0, block)
    assert case.hit(tokens) == 96
    case.serve("again", tokens, 30)
    case.manager.pool.unpublish(0, blocks[4])
    assert case.hit(tokens[:90]) == 0


# Room.


def test_a_refused_admission_changes_nothing() -> None:
    case = Driver(make_cut("as", [2, 1], num_slabs=8))
    case.serve("old", range(40))
    running = case.new("running", range(200, 300))
    assert case.admit(running)
    waiting = case.new("waiting", [*range(40), *range(400, 500)])
    before = snapshot(case.manager)
    assert not case.admit(waiting)
    assert snapshot(case.manager) == before
    assert waiting.num_computed_tokens == 0


def test_hits_are_pinned_before_room_is_made() -> None:
    """A hit is never evicted to make room for the blocks behind it."""
    case = Driver(make_cut("as", [1, 1], num_slabs=8))
    tokens = case.serve("first", range(50)).token_ids[:50].tolist()
    request = case.new("second", [*tokens, *range(500, 520)])
    # Three blocks and a state are hit, two blocks and a state are new: one slab more than there is.
    assert case.hit(request.token_ids.tolist()) == 48
    assert case.admit(request)
    case.step({request: 22})
    case.assert_right_answer(request)
    case.check()


def test_a_lookup_is_a_view() -> None:
    case = driver(block_size=2 * UNIT)
    tokens = case.serve("r", range(100), checkpoint_at=(16, 48, 80)).token_ids.tolist()
    request = case.new("probe", tokens)
    before = snapshot(case.manager)
    computed, boundary, _ = case.manager.get_computed_blocks(request)
    assert boundary == 96
    views = {end: case.manager.truncate_computed_blocks(computed, end).boundary for end in range(0, 120, 8)}
    assert views == {e: max(p for p in (0, 16, 48, 80, 96) if p <= e) for e in views}
    assert snapshot(case.manager) == before


def test_a_fork_shares_what_is_full_and_copies_the_tail() -> None:
    case = driver(block_size=2 * UNIT)
    parent = case.new("parent", range(40))
    assert case.admit(parent)
    case.step({parent: 40})
    child = case.new("child", [*range(40), 5])
    assert case.manager.fork(parent, child)
    [copy] = case.manager.take_copies()
    case.manager.end_copies()
    assert (copy.num_tokens, copy.target) == (8, case.manager.block_tables(child)[0][1])
    assert case.manager.block_tables(child)[0][0] == case.manager.block_tables(parent)[0][0]
    of_parent, of_child = case.manager.requests["parent"].state, case.manager.requests["child"].state
    assert of_parent is not None
    assert of_child is not None
    assert of_parent.current == of_child.current
    for request in (parent, child):
        assert case.manager.allocate_slots(request, 1) is not None
        case.manager.grant_write(request)
        step = case.manager.state_step(request)
        assert step is not None
        assert step.write_block != step.read_block


@pytest.mark.parametrize("kinds", ["a", "s", "as", "aws", "ws"])
def test_when_everybody_is_gone_nothing_is_held(kinds: str) -> None:
    """R5, and SCENARIOS 23: the same id again and again."""
    case = driver(kinds, block_size=2 * UNIT, num_slabs=300)
    for round_number in range(60):
        case.serve("same id", [*range(20 + round_number % 30), *[round_number % 7] * 20], 1 + round_number % 20)
        census(case.manager)
    case.check()


def test_a_reset_forgets_everything_and_is_refused_while_anything_runs() -> None:
    case = driver()
    tokens = case.serve("r", range(60)).token_ids.tolist()
    running = case.new("running", range(100, 160))
    assert case.admit(running)
    before = snapshot(case.manager)
    assert not case.manager.reset_prefix_cache()
    assert snapshot(case.manager) == before
    case.step({running: 60})
    case.finish(running)
    assert case.manager.reset_prefix_cache()
    assert case.hit(tokens) == 0
    assert case.manager.pool.counts()["num_empty_slabs"] == case.layout.num_slabs - 1


def test_a_group_that_takes_no_part_publishes_nothing_and_changes_no_hit() -> None:
    """SCENARIOS 9: a scratch group that is not even cached."""
    for prefix, published in [("fine", 4), ("none", 0)]:
        layout = make_cut("aws", [1, 1, 1], num_slabs=60, window=30, prefix={"w": prefix})
        manager = KVCacheManager(layout, CacheConfig(), max_step_tokens=512)
        case = Driver(layout)
        case.manager = manager
        request = case.new("r", range(70))
        assert case.admit(request)
        manager.grant_write(request)
        manager.grant_exports(request, 70)
        manager.take_copies()
        manager.end_copies()
        manager.commit(request, 70)
        case.finish(request)
        assert len(list(manager.index.published(1))) == published
        probe = case.new("probe", range(71))
        computed, boundary, report = manager.get_computed_blocks(probe)
        assert boundary == 64
        assert ("window" in report.boundary_by_group) == (prefix == "fine")
        assert manager.allocate_slots(probe, 7, computed) is not None
        manager.free(probe)
        census(manager)


def test_a_sample_that_thaws_the_prompts_state_owes_nothing_for_it() -> None:
    """Its state was published by another sample, which is gone."""
    case = Driver(make_cut("as", [1, 1], num_slabs=6))
    parent = case.new("parent", range(32))
    assert case.admit(parent)
    case.step({parent: 32})
    child = case.new("child", parent.token_ids.tolist())
    assert case.manager.fork(parent, child)
    case.finish(parent)
    taken = case.manager.pool.allocate([1, 0], [0, 0])
    assert taken is not None
    case.manager.pins.adopt(0, taken[0][0])
    assert case.manager.allocate_slots(child, 1) is not None
    case.step({child: 1})
    assert case.manager.counters["boundary_states_thawed"] == 1
    assert child.num_states_kept == 0
    case.check()


@pytest.mark.parametrize("n", [20, 63, 64, 65, 130])
def test_a_group_of_whole_blocks_has_hits_of_whole_blocks(n: int) -> None:
    """SCENARIOS 9: one group that cannot look up finer makes hits coarser, and breaks nothing."""
    case = Driver(make_cut("aw", [1, 1], num_slabs=60, block_size=32, window=40, prefix={"w": "block"}))
    prompt = list(range(n))
    case.serve("r", prompt)
    assert case.hit(prompt) == (n - 1) // 32 * 32
    again = case.serve("again", prompt, 5)
    case.assert_right_answer(again)
    case.check()
