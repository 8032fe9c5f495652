"""The three facts every eviction policy has to respect, seen through hits."""

import pytest

from dalsegno.config import CacheConfig
from dalsegno.testing.builders import make_cut
from tests.kv.driver import Driver

UNIT = 16


def driver(num_slabs: int, *, interval: int = 0, block_size: int = UNIT) -> Driver:
    """One block per slab in both groups, so that blocks are evicted one by one."""
    config = CacheConfig(block_size=block_size, decode_checkpoint_interval=interval)
    return Driver(make_cut("as", [1, 1], num_slabs=num_slabs, block_size=block_size), config)


def hold_all_spare(case: Driver) -> None:
    """Take every empty slab, so that the next allocation evicts."""
    while case.manager.pool.counts()["num_empty_slabs"]:
        taken = case.manager.pool.allocate([1, 0], [0, 0])
        assert taken is not None


def evict(case: Driver) -> None:
    """Make the pool give up one block for good."""
    evicted = case.manager.pool.num_evicted
    taken = case.manager.pool.allocate([1, 0], [0, 0])
    assert taken is not None
    assert case.manager.pool.num_evicted == evicted + 1


def test_attention_behind_the_last_state_goes_before_older_chains() -> None:
    case = driver(num_slabs=40)
    old = case.serve("old", range(100, 150)).token_ids.tolist()
    # No answer states: everything behind the prompt's tail at 32 is dead weight.
    new = case.serve("new", range(40), 60).token_ids.tolist()
    hold_all_spare(case)
    dead = (99 // UNIT) - 32 // UNIT
    for _ in range(dead):
        evict(case)
        assert case.hit(old) == 48
        assert case.hit(new[:40]) == 32
    evict(case)
    assert case.hit(old) < 48
    assert case.hit(new[:40]) == 32


def test_a_state_whose_attention_is_gone_goes_before_older_chains() -> None:
    case = driver(num_slabs=40)
    old = case.serve("old", range(100, 150)).token_ids.tolist()
    new = case.serve("new", range(50)).token_ids.tolist()
    probe = case.new("probe", new)
    attention = case.manager.index.find(0, probe.root_hash, probe.block_hashes, UNIT)
    state = case.manager.index.find_state(probe.block_hashes[2])
    case.manager.pool.unpublish(0, attention)
    hold_all_spare(case)
    while case.hit(old) == 48:
        evict(case)
    assert not case.manager.index.is_published(1, state), "an older chain was evicted before a dead state"


@pytest.mark.parametrize("num_answers", [1, 40])
def test_the_states_of_a_chain_are_not_singled_out(num_answers: int) -> None:
    """A chain's states were written early and its attention late: both must count as used when the request ended."""
    case = driver(num_slabs=60, interval=UNIT)
    slow = case.new("slow", range(50), checkpoint_at=(17,))
    assert case.admit(slow)
    case.step({slow: 50})
    others = [case.serve(f"other {i}", range(1000 * i, 1000 * i + 40), 3).token_ids.tolist() for i in (1, 2, 3)]
    while slow.num_output_tokens < num_answers:
        case.compute(slow)
    case.finish(slow)
    tokens = slow.token_ids.tolist()
    whole = case.hit([*tokens, 1])
    assert whole == 48 + (num_answers - 2) // UNIT * UNIT if num_answers > 1 else 48
    hold_all_spare(case)
    while any(case.hit(other) for other in others):
        assert case.hit([*tokens, 1]) == whole, "the newest chain lost its hit while older ones had theirs"
        evict(case)


def test_a_chain_shrinks_from_its_end() -> None:
    case = driver(num_slabs=60)
    tokens = case.serve("r", range(130), checkpoint_at=(33, 64, 100)).token_ids.tolist()
    hits = [case.hit(tokens)]
    hold_all_spare(case)
    while hits[-1]:
        evict(case)
        hits.append(case.hit(tokens))
    assert hits == sorted(hits, reverse=True)
    assert sorted(set(hits)) == [0, 32, 64, 96, 128]


def test_a_hit_makes_a_chain_recent_again() -> None:
    case = driver(num_slabs=60)
    first, second = (
        case.serve(name, range(start, start + 50)).token_ids.tolist() for name, start in [("a", 0), ("b", 99)]
    )
    case.serve("a again", first)
    hold_all_spare(case)
    while case.hit(second):
        assert case.hit(first) == 48
        evict(case)
