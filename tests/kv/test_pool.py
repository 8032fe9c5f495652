"""Where blocks are placed and what is evicted for them, by example."""

from collections.abc import Sequence

import pytest

from dalsegno.hashing.block_hash import root_hash
from dalsegno.kv.eviction import LeastRecentlyUsed
from dalsegno.kv.index import PrefixIndex
from dalsegno.kv.pool import SlabPool
from dalsegno.testing.builders import make_cut
from dalsegno.types import NULL_BLOCK, BlockHash

UNIT = 16


class Pool:
    """A pool with its index, and one-unit chains to publish blocks under."""

    def __init__(self, kinds: str, blocks_per_slab: Sequence[int], num_slabs: int, slab_reserve: int = 0) -> None:
        self.k = blocks_per_slab
        layout = make_cut(kinds, blocks_per_slab, num_slabs=num_slabs)
        self.index = PrefixIndex(layout, UNIT)
        self.pool = SlabPool(layout, self.index, LeastRecentlyUsed(self.index), slab_reserve)
        self.num_published = 0

    def take(self, group: int = 0, count: int = 1, near: int = NULL_BLOCK) -> list[int]:
        needs = [0] * len(self.k)
        needs[group] = count
        nears = [NULL_BLOCK] * len(self.k)
        nears[group] = near
        taken = self.pool.allocate(needs, nears)
        assert taken is not None, "no room"
        return taken[group]

    def publish(self, group: int, block: int) -> None:
        self.num_published += 1
        root = root_hash(UNIT, str(self.num_published))
        self.index.publish(group, root, [BlockHash(root[::-1])], UNIT, block)

    def cache(self, group: int, *blocks: int) -> None:
        """Publish blocks and let go of them, the first one first."""
        for block in blocks:
            self.publish(group, block)
            self.pool.unpin(group, block)

    def slab(self, group: int, block: int) -> int:
        return block // self.k[group]


def test_two_requests_have_slabs_of_their_own_while_there_are_spare_ones() -> None:
    case = Pool("a", [4], num_slabs=6)
    first, second = case.take(), case.take()
    assert case.slab(0, first[0]) != case.slab(0, second[0])


def test_a_request_fills_its_own_slab_first() -> None:
    case = Pool("a", [4], num_slabs=6)
    case.take()
    [block] = case.take()
    more = case.take(count=3, near=block)
    assert {case.slab(0, each) for each in [block, *more]} == {case.slab(0, block)}


@pytest.mark.parametrize("reserve", [0, 1, 2])
def test_slabs_are_shared_once_no_more_than_the_reserve_is_spare(reserve: int) -> None:
    case = Pool("a", [4], num_slabs=5, slab_reserve=reserve)
    slabs = [case.slab(0, case.take()[0]) for _ in range(4)]
    assert len(set(slabs)) == 4 - reserve


def test_own_slabs_are_taken_only_as_long_as_more_than_the_reserve_is_spare() -> None:
    """Three open blocks of others would do; the first slab of its own is spare, the next one would not be."""
    case = Pool("a", [3], num_slabs=5, slab_reserve=1)
    shared = {case.slab(0, case.take()[0]) for _ in range(2)}
    assert {case.slab(0, block) in shared for block in case.take(count=4)} == {False, True}


def test_a_packing_pool_takes_no_slab_that_open_blocks_could_spare() -> None:
    case = Pool("a", [4], num_slabs=9)
    case.pool.packs = True
    blocks = [block for _ in range(8) for block in case.take()]
    assert len({case.slab(0, block) for block in blocks}) == 2


def test_free_open_blocks_are_taken_before_cached_ones() -> None:
    case = Pool("a", [3], num_slabs=2)
    held, cached = case.take(count=2)
    case.cache(0, cached)
    [free] = case.take()
    assert free not in (held, cached)
    assert case.index.is_published(0, cached)


def test_the_least_recently_used_open_block_is_evicted_first() -> None:
    case = Pool("a", [4], num_slabs=2)
    held, *cached = case.take(count=4)
    case.cache(0, *cached)
    case.pool.pin(0, cached[0])
    case.pool.unpin(0, cached[0])
    assert case.take(near=held) == [cached[1]]
    assert case.take(near=held) == [cached[2]]
    assert case.take(near=held) == [cached[0]]


def test_a_pin_taken_back_unused_leaves_the_order_as_it_was() -> None:
    case = Pool("a", [4], num_slabs=2)
    _, *cached = case.take(count=4)
    case.cache(0, *cached)
    case.pool.pin(0, cached[0])
    case.pool.unpin(0, cached[0], used=False)
    assert case.take() == [cached[0]]


def test_a_slab_is_reclaimed_whole_and_the_one_whose_newest_use_is_oldest_first() -> None:
    case = Pool("a", [2], num_slabs=4)
    one, two, three = (case.take(count=2) for _ in range(3))
    case.cache(0, one[0], two[0], three[0], three[1], two[1])
    case.publish(0, one[1])
    case.pool.unpin(0, one[1])
    [block] = case.take()
    assert case.slab(0, block) == case.slab(0, three[0])
    assert not any(case.index.is_published(0, each) for each in three)
    assert all(case.index.is_published(0, each) for each in [*one, *two])


def test_a_reclaimed_slab_moves_to_another_group() -> None:
    case = Pool("as", [4, 1], num_slabs=2)
    blocks = case.take(count=4)
    case.cache(0, *blocks)
    [state] = case.take(group=1)
    assert case.slab(1, state) == case.slab(0, blocks[0])
    assert len(case.index) == 0


def test_memory_returns_to_no_group_when_nothing_is_left_in_a_slab() -> None:
    case = Pool("as", [4, 1], num_slabs=2)
    for block in case.take(count=4):
        case.pool.unpin(0, block)
    assert case.pool.counts()["num_empty_slabs"] == 1
    assert case.take(group=1) == [1]


def test_what_was_evicted_is_told_with_what_it_vouched_for() -> None:
    case = Pool("a", [1], num_slabs=2)
    told: list[tuple[int, int, Sequence[BlockHash]]] = []
    case.pool.on_evict = lambda group, block, hashes: told.append((group, block, hashes))
    [block] = case.take()
    case.cache(0, block)
    hashes = [block_hash for _, block_hash in case.index.vouched(0, block)]
    case.take()
    assert told == [(0, block, hashes)]
    assert case.pool.num_evicted == 1


def test_an_unpublished_block_goes_on_serving_who_holds_it() -> None:
    case = Pool("a", [1], num_slabs=2)
    [block] = case.take()
    case.publish(0, block)
    case.pool.unpublish(0, block)
    assert case.pool.num_references(0, block) == 1
    case.pool.unpin(0, block)
    assert case.pool.counts()["num_empty_slabs"] == 1


def test_ranks_are_remembered_in_bounded_memory() -> None:
    case = Pool("a", [4], num_slabs=5)
    held = [case.take() for _ in range(4)]
    cached = [block for [near] in held for block in case.take(count=3, near=near)]
    case.cache(0, *cached)
    for _ in range(500):
        for block in cached:
            case.pool.pin(0, block)
            case.pool.unpin(0, block)
    assert len(case.pool._block_queues[0]) < 400
    for [block] in held:
        case.pool.unpin(0, block)
    for _ in range(50):
        for block in cached:
            case.pool.pin(0, block)
            case.pool.unpin(0, block)
        case.cache(0, case.take()[0])
    assert len(case.pool._slab_queue) < 400
