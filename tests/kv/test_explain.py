"""Why a prompt did not hit further: the reason given is the reason there was."""

import pytest

from dalsegno.config import CacheConfig
from dalsegno.hit_report import HitReport
from dalsegno.kv.lookup import EvictedRing
from dalsegno.testing.builders import make_cut, make_layout
from tests.kv.driver import Driver
from tests.kv.test_eviction import evict, hold_all_spare

UNIT = 16


def driver(kinds: str = "as", **config: int) -> Driver:
    cache_config = CacheConfig(**{"decode_checkpoint_interval": 0, **config})  # type: ignore[arg-type]
    return Driver(make_layout(kinds, cache_config, num_slabs=200), cache_config)


def report(case: Driver, token_ids: list[int]) -> HitReport:
    _, boundary, found = case.manager.get_computed_blocks(case.new("probe", token_ids))
    assert found.boundary == boundary
    assert sum(found.cached_by_tier.values()) == boundary
    assert boundary + sum(found.lost.values()) == len(token_ids)
    return found


@pytest.mark.parametrize("n", [1, 15, 16])
def test_a_short_prompt_is_shorter_than_a_unit(n: int) -> None:
    """SCENARIOS 1: not "no match"."""
    case = driver()
    case.serve("r", range(n))
    assert report(case, list(range(n))).lost == {"shorter_than_unit": n}


@pytest.mark.parametrize("kinds", ["a", "s", "as", "aws"])
def test_what_nobody_sent_before_is_new(kinds: str) -> None:
    case = driver(kinds)
    case.serve("r", range(1000, 1100))
    assert report(case, list(range(70))).lost == {"new": 64, "sub_unit": 6}


@pytest.mark.parametrize("kinds", ["a", "s", "as", "aws"])
def test_what_goes_on_behind_a_whole_prompt_is_new(kinds: str) -> None:
    case = driver(kinds)
    case.serve("r", range(64))
    found = report(case, list(range(100)))
    assert (found.boundary, found.lost) == (64, {"new": 32, "sub_unit": 4})


def test_a_resend_loses_its_last_tokens_alone() -> None:
    case = driver()
    case.serve("r", range(64))
    case.serve("s", range(200, 270))
    assert report(case, list(range(64))).lost == {"last_token": 16}
    assert report(case, list(range(200, 270))).lost == {"sub_unit": 6}


def test_another_continuation_of_a_known_prefix_has_diverged() -> None:
    case = driver("a")
    case.serve("r", range(100))
    assert report(case, [*range(50), *[900] * 40]).lost == {"diverged": 32, "sub_unit": 10}


def test_attention_without_a_state_is_no_boundary_state() -> None:
    case = driver()
    case.serve("r", range(100))
    found = report(case, [*range(50), *[900] * 40])
    assert found.boundary_by_group == {"attention": 48, "state": 0}
    assert found.lost == {"no_boundary_state": 48, "diverged": 32, "sub_unit": 10}


def test_a_state_that_was_evicted_is_evicted_and_not_missing() -> None:
    case = Driver(make_cut("as", [1, 1], num_slabs=40), CacheConfig(decode_checkpoint_interval=0))
    tokens = case.serve("r", range(50)).token_ids[:50].tolist()
    hold_all_spare(case)
    while list(case.manager.index.published(1)):
        evict(case)
    assert list(case.manager.index.published(0)), "the attention should outlive the state in this test"
    lost = report(case, tokens).lost
    assert lost.pop("sub_unit") == 2
    assert set(lost) == {"evicted"}


@pytest.mark.parametrize("kinds", ["a", "s", "w"])
def test_one_group_that_was_evicted_is_evicted_and_not_new(kinds: str) -> None:
    case = Driver(make_cut(kinds, [1], num_slabs=40), CacheConfig(decode_checkpoint_interval=0))
    tokens = case.serve("r", range(50)).token_ids[:50].tolist()
    while case.manager.pool.counts()["num_empty_slabs"]:
        case.manager.pool.allocate([1], [0])
    while case.hit(tokens):
        case.manager.pool.allocate([1], [0])
    assert set(report(case, tokens).lost) == {"evicted", "sub_unit"}


def test_the_ring_of_evicted_hashes_is_bounded_and_forgets_the_oldest() -> None:
    case = driver("a")
    request = case.serve("r", range(100))
    hashes = request.block_hashes[:5]
    ring = EvictedRing(2, capacity=3)
    ring.add(0, hashes[:3])
    ring.add(0, hashes[:1])
    ring.add(0, hashes[3:4])
    assert [ring.has_any(0, [block_hash]) for block_hash in hashes] == [True, False, True, True, False]
    assert ring.has_any(0, hashes[1:3])
    assert not ring.has_any(1, hashes)
    ring.clear()
    assert not ring.has_any(0, hashes)


def test_reasons_add_up_for_every_length_and_divergence() -> None:
    case = driver("aws", block_size=4 * UNIT)
    case.serve("r", range(130), 40, checkpoint_at=(50,))
    case.serve("s", [*range(90), *[700] * 40], 3)
    for n in range(1, 150):
        report(case, list(range(n)))
        for cut in range(0, n, 23):
            report(case, [*range(cut), *[901] * (n - cut)])
