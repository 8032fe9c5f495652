"""The prefix index by example: what the state machine once found, and what callers rely on."""

from dalsegno.hashing.block_hash import extend_block_hashes, root_hash, to_token_array
from dalsegno.kv.index import PrefixIndex
from dalsegno.testing.builders import make_cut
from dalsegno.types import NULL_BLOCK, BlockHash

UNIT = 16
ROOT = root_hash(UNIT)


def chain(num_units: int, *, last: int = 0) -> list[BlockHash]:
    """Hashes of a chain; another `last` gives one that differs in its last unit only."""
    tokens = [*range(UNIT * (num_units - 1)), *[10_000 + last] * UNIT]
    hashes: list[BlockHash] = []
    extend_block_hashes(ROOT, hashes, to_token_array(tokens), UNIT)
    return hashes


def index_of(kinds: str, block_size: int = 4 * UNIT) -> PrefixIndex:
    return PrefixIndex(make_cut(kinds, [1] * len(kinds), num_slabs=100, block_size=block_size), UNIT)


def publish(index: PrefixIndex, group: int, hashes: list[BlockHash], units: int, block: int) -> int:
    return index.publish(group, ROOT, hashes, units * UNIT, block)


def find(index: PrefixIndex, group: int, hashes: list[BlockHash]) -> list[int]:
    """The vouching block of every boundary of a chain."""
    return [index.find(group, ROOT, hashes, units * UNIT) for units in range(1, len(hashes) + 1)]


def test_the_first_block_published_under_a_hash_stays() -> None:
    index = index_of("as")
    hashes = chain(4)
    for group in (0, 1):
        assert publish(index, group, hashes, 1, 7) == 7
        assert publish(index, group, hashes, 1, 8) == 7
        assert not index.is_published(group, 8)


def test_blocks_that_took_turns_in_one_place_can_be_dropped_in_any_order() -> None:
    """One unit came from a slow request, the next from a fast one, the third from the slow one again."""
    hashes = chain(3)
    for first, second in [(7, 8), (8, 7)]:
        index = index_of("a")
        publish(index, 0, hashes, 1, 7)
        publish(index, 0, hashes, 2, 8)
        publish(index, 0, hashes, 3, 7)
        index.unpublish(0, first)
        survivor = index.find(0, ROOT, hashes, 3 * UNIT)
        # What the longest block of the place vouches for, it vouches for from the start of the block.
        assert find(index, 0, hashes[: 3 if first == 8 else 2]) == [second] * (3 if first == 8 else 2)
        assert survivor == (NULL_BLOCK if first == 7 else 7)
        index.unpublish(0, second)
        assert len(index) == 0
        assert not list(index.tree)


def test_a_tail_published_after_its_source_was_evicted_vouches_from_the_start_of_its_block() -> None:
    """A hit copied the source's tokens; what it appends makes the copy as good as the source was."""
    index = index_of("as")
    hashes = chain(4)
    publish(index, 0, hashes, 1, 7)
    publish(index, 0, hashes, 2, 7)
    index.unpublish(0, 7)
    publish(index, 1, hashes, 1, 3)
    assert index.is_dead(1, 3)
    publish(index, 0, hashes, 3, 8)
    assert find(index, 0, hashes) == [8, 8, 8, NULL_BLOCK]
    assert not index.is_dead(1, 3)
    assert not index.is_dead(0, 8)


def test_a_block_vouches_for_nothing_before_it_in_another_block() -> None:
    index = index_of("a", block_size=2 * UNIT)
    hashes = chain(4)
    publish(index, 0, hashes, 4, 9)
    assert find(index, 0, hashes) == [NULL_BLOCK, NULL_BLOCK, 9, 9]


def test_a_state_vouches_for_its_boundary_alone() -> None:
    index = index_of("s")
    hashes = chain(4)
    publish(index, 0, hashes, 3, 9)
    assert find(index, 0, hashes) == [NULL_BLOCK, NULL_BLOCK, 9, NULL_BLOCK]


def test_attention_behind_the_last_state_of_its_chain_is_dead() -> None:
    index = index_of("as", block_size=UNIT)
    hashes = chain(4)
    for unit in range(1, 5):
        publish(index, 0, hashes, unit, unit)
    assert all(index.is_dead(0, block) for block in range(1, 5))
    publish(index, 1, hashes, 2, 9)
    assert [index.is_dead(0, block) for block in range(1, 5)] == [False, False, True, True]
    index.unpublish(1, 9)
    assert all(index.is_dead(0, block) for block in range(1, 5))


def test_a_state_is_dead_while_attention_below_it_is_missing() -> None:
    index = index_of("as", block_size=UNIT)
    hashes = chain(3)
    publish(index, 1, hashes, 3, 9)
    publish(index, 0, hashes, 1, 1)
    publish(index, 0, hashes, 3, 3)
    assert index.is_dead(1, 9)
    publish(index, 0, hashes, 2, 2)
    assert not index.is_dead(1, 9)
    index.unpublish(0, 1)
    assert index.is_dead(1, 9)


def test_branches_live_and_die_apart() -> None:
    index = index_of("as", block_size=UNIT)
    left, right = chain(2, last=1), chain(2, last=2)
    for unit, block in [(1, 1), (2, 2)]:
        publish(index, 0, left, unit, block)
    publish(index, 0, right, 2, 3)
    publish(index, 1, left, 2, 8)
    assert [index.is_dead(0, block) for block in (1, 2, 3)] == [False, False, True]
    publish(index, 1, right, 2, 9)
    index.unpublish(1, 8)
    assert [index.is_dead(0, block) for block in (1, 2, 3)] == [False, True, False]


def test_a_forgotten_index_is_an_empty_one() -> None:
    index = index_of("as")
    hashes = chain(3)
    publish(index, 0, hashes, 3, 1)
    publish(index, 1, hashes, 3, 1)
    index.clear()
    assert len(index) == 0
    assert not list(index.tree)
    assert publish(index, 0, hashes, 3, 2) == 2
