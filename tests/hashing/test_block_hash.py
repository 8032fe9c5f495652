"""Block hashes: fixed values, one chain per key domain, the same in every process."""

import itertools
import json
import os
import subprocess
import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.hashing.block_hash import extend_block_hashes, root_hash, to_token_array
from dalsegno.types import BlockHash

# Computed from the definition by a script of ten lines that shares nothing with the package.
ROOTS = [
    (16, None, None, "ec43b2fdd5c730b599c664afff3c70331c57d6dda84f75abac3db4acfd1f92d0"),
    (16, "x", None, "1dc2edc17bbb21221c9b93094995412c93428d721b9b6a898a4ea07e0e9070c8"),
    (16, None, "x", "f07b4d23dd12713c1c18aaf332523bcc74e110f37434a3e5abc0c76e85ba2d05"),
    (16, "", None, "9795929b2ce89b68b72a9839caf954d88c4dcc91048fdfd32a8b89ab9959fe2a"),
    (32, None, None, "b3d0319a8d8380646c0db2ea5bbf61b847324ea438d1b82f51c76f13378c4688"),
    (16, "café", None, "ee6ef76b6fcdfb93f09095e6f20b64e8df7745d50413c2e60a565117a85ff14c"),
]
CHAINS = [
    (
        16,
        None,
        list(range(40)),
        [
            "9d55a790b03930b905767b23827e262d1ec2cd40f82b0ced74f08720a25aef0b",
            "5b5a6b74ebad157d1762676ea9f1ea1d0dc6907cf83a7f6ec443772c39052d88",
        ],
    ),
    (
        4,
        "x",
        [0, 1, 65536, 2**32 - 1, 0, 1, 65536, 2**32 - 1, 5],
        [
            "d1bb05fcc6f62299595d6b56befd1e0e31c44a0457464ef2677ad6296e2cbc5b",
            "ce6e0754cb5cbc6fcaf1734d7685d1407f2722fd934d01d162c688ea54c527d2",
        ],
    ),
]

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=50)


def chain(unit: int, token_ids: list[int], salt: str | None = None) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    extend_block_hashes(root_hash(unit, salt), hashes, to_token_array(token_ids), unit)
    return hashes


@pytest.mark.parametrize(("unit", "salt", "adapter", "expected"), ROOTS)
def test_root_hashes_never_change(unit: int, salt: str | None, adapter: str | None, expected: str) -> None:
    assert root_hash(unit, salt, adapter).hex() == expected


@pytest.mark.parametrize(("unit", "salt", "token_ids", "expected"), CHAINS)
def test_chained_hashes_never_change(unit: int, salt: str | None, token_ids: list[int], expected: list[str]) -> None:
    assert [block_hash.hex() for block_hash in chain(unit, token_ids, salt)] == expected


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_another_process_computes_the_same_hashes(seed: str) -> None:
    """SCENARIOS 81: keys that depend on the process turn every hit across a restart into a miss."""
    program = (
        "import json; from dalsegno.hashing.block_hash import *; hashes = []\n"
        "extend_block_hashes(root_hash(4, 'x'), hashes, to_token_array(range(11)), 4)\n"
        "print(json.dumps([h.hex() for h in hashes]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    answer = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(answer) == [block_hash.hex() for block_hash in chain(4, list(range(11)), "x")]


def test_key_domains_are_separated_by_their_source() -> None:
    """SCENARIOS 82: salt "x" and adapter "x" are no more the same than "x" and "y"."""
    names = [None, "", "a", "b", "ab", "a\x00b", "salt", "\ud800"]
    roots = [root_hash(unit, salt, adapter) for unit in (1, 16) for salt in names for adapter in names]
    assert len(set(roots)) == len(roots)


def test_no_two_fields_run_into_each_other() -> None:
    pairs = itertools.product(["", "a", "aa", "aaa"], repeat=2)
    assert len({root_hash(16, *pair) for pair in pairs}) == 16


@given(tokens, st.integers(1, 7))
def test_only_full_units_are_hashed(token_ids: list[int], unit: int) -> None:
    assert len(chain(unit, token_ids)) == len(token_ids) // unit


@given(tokens, st.lists(st.integers(0, 50), max_size=5), st.integers(1, 7))
def test_extending_in_pieces_equals_hashing_at_once(token_ids: list[int], cuts: list[int], unit: int) -> None:
    hashes: list[BlockHash] = []
    for cut in [*sorted(cuts), len(token_ids)]:
        extend_block_hashes(root_hash(unit), hashes, to_token_array(token_ids[:cut]), unit)
    assert hashes == chain(unit, token_ids)


@given(tokens, tokens, st.integers(1, 5))
def test_hashes_agree_exactly_as_far_as_the_prefixes_do(left: list[int], right: list[int], unit: int) -> None:
    common = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    agreeing = [a == b for a, b in zip(chain(unit, left), chain(unit, right), strict=False)]
    assert agreeing == [(i + 1) * unit <= common for i in range(len(agreeing))]


@given(st.lists(st.integers(0, 3), min_size=8, max_size=20), st.lists(st.integers(0, 3), max_size=9))
def test_a_hash_names_the_prefix_and_not_the_unit_alone(first: list[int], second: list[int]) -> None:
    repeated = chain(4, [*first, *second, 9, 9, 9, 9])
    assert len(set(repeated)) == len(repeated)


def test_hashing_leaves_its_input_alone() -> None:
    token_ids = to_token_array(range(40))
    extend_block_hashes(root_hash(16), [], token_ids, 16)
    token_ids.append(7)
    assert token_ids == array("I", [*range(40), 7])


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_an_id_that_does_not_fit_a_word_is_refused(token_id: int) -> None:
    with pytest.raises(OverflowError):
        to_token_array([token_id])


def test_an_id_that_is_no_integer_is_refused() -> None:
    with pytest.raises(TypeError):
        to_token_array([1.5])  # type: ignore[list-item]
