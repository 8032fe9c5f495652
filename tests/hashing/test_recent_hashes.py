"""Recently seen prompts save hashing and change no hash."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.hashing import recent as recent_module
from dalsegno.hashing.block_hash import extend_block_hashes, root_hash, to_token_array
from dalsegno.hashing.recent import RecentHashes
from dalsegno.types import BlockHash

UNIT = 4
ROOTS = (root_hash(UNIT), root_hash(UNIT, "salted"))


def direct(token_ids: Sequence[int], root: BlockHash = ROOTS[0]) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    extend_block_hashes(root, hashes, to_token_array(token_ids), UNIT)
    return hashes


@st.composite
def families(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """Prompts that grow out of each other: (domain, tokens), with a small alphabet so that much is shared."""
    prompts: list[tuple[int, list[int]]] = []
    for _ in range(draw(st.integers(1, 12))):
        grows = draw(st.booleans())
        base = prompts[draw(st.integers(0, len(prompts) - 1))][1] if prompts and grows else []
        kept = draw(st.integers(0, len(base)))
        prompts.append((draw(st.integers(0, 1)), base[:kept] + draw(st.lists(st.integers(0, 1), max_size=30))))
    return prompts


@given(families(), st.integers(1, 20_000))
def test_a_remembered_prompt_hashes_as_an_unknown_one(prompts: list[tuple[int, list[int]]], max_bytes: int) -> None:
    recent = RecentHashes(UNIT, max_bytes)
    for domain, token_ids in prompts:
        assert recent.hashes(ROOTS[domain], to_token_array(token_ids)) == direct(token_ids, ROOTS[domain])


@given(families(), st.integers(1, 20_000))
def test_memory_is_bounded(prompts: list[tuple[int, list[int]]], max_bytes: int) -> None:
    recent = RecentHashes(UNIT, max_bytes)
    longest = max(len(token_ids) for _, token_ids in prompts)
    for domain, token_ids in prompts:
        recent.hashes(ROOTS[domain], to_token_array(token_ids))
        held = [entry for bucket in recent._buckets.values() for entry in bucket]
        num_bytes = sum(4 * len(known) + 73 * len(hashes) for known, hashes in held)
        assert recent._num_bytes == num_bytes
        # The prompts of one first unit are kept or dropped together, and there are few of them.
        assert num_bytes <= max(max_bytes, 4 * (4 * longest + 73 * (longest // UNIT)))


def test_the_next_turn_hashes_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counting(root: BlockHash, hashes: list[BlockHash], token_ids: Sequence[int], unit: int) -> None:
        before = len(hashes)
        extend_block_hashes(root, hashes, to_token_array(token_ids), unit)
        hashed.append(len(hashes) - before)

    monkeypatch.setattr(recent_module, "extend_block_hashes", counting)
    recent = RecentHashes(UNIT)
    history = list(range(400))
    recent.hashes(ROOTS[0], to_token_array(history))
    hashed.clear()
    assert recent.hashes(ROOTS[0], to_token_array([*history, *range(10)])) == direct([*history, *range(10)])
    assert sum(hashed) == 1 + 10 // UNIT


def test_a_result_belongs_to_the_caller() -> None:
    recent = RecentHashes(UNIT)
    prompt = to_token_array(range(20))
    recent.hashes(ROOTS[0], prompt).clear()
    prompt[7] = 99
    assert recent.hashes(ROOTS[0], to_token_array(range(20))) == direct(range(20))


def test_the_least_recently_used_prompt_goes_first() -> None:
    recent = RecentHashes(UNIT, max_bytes=2 * (4 * 20 + 73 * (20 // UNIT)))
    first, second, third = ([start, *range(19)] for start in (100, 200, 300))
    for prompt in (first, second, first, third):
        recent.hashes(ROOTS[0], to_token_array(prompt))
    assert list(recent._buckets) == [direct(first)[0], direct(third)[0]]
