"""Keys and headers to the byte: golden values, canonical encodings, other versions."""

import hashlib
import itertools
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.store.base import Status
from dalsegno.store.keys import MAX_KEY_BYTES, StoreKey, namespace_digest, salt_tag
from dalsegno.store.memory import MemoryStore
from dalsegno.store.objects import StoreObject, get_objects, put_objects
from dalsegno.types import BlockHash
from tests.repo.source import ROOT

GOLDEN = Path(__file__).with_name("golden_object.bin")
KEY = StoreKey(namespace_digest({"model": "m", "rank": 0}), salt_tag("x"), "state", 48, BlockHash(bytes(range(32))))
PARTS = [bytes(range(200)), b"", b"tail"]


def views(parts: list[bytes]) -> list[memoryview]:
    return [memoryview(bytearray(part)) for part in parts]


def test_a_key_has_the_golden_text_and_digest() -> None:
    assert namespace_digest({"rank": 0, "model": "m"}) == "67101b2e7fd90cd0370f7284db2d4e07"
    assert (salt_tag(None), salt_tag("x"), salt_tag(None, "x")) == (
        "c05cdaac898cbbe2",
        "2f5ced7b94c9b6c5",
        "711f590b05e0228a",
    )
    assert KEY.text == f"dalsegno:{KEY.namespace}:{KEY.salt}:state:48:{bytes(range(32)).hex()}"
    assert KEY.digest == hashlib.sha256(KEY.text.encode()).digest()
    assert StoreKey.from_text(KEY.text) == KEY


def test_names_do_not_depend_on_the_hash_seed() -> None:
    program = "from tests.store.test_objects import KEY; print(KEY.text)"
    for seed in ("1", "2"):
        command = [sys.executable, "-c", program]
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == KEY.text


def test_the_longest_key_is_printable_and_fits() -> None:
    key = StoreKey("f" * 32, "0" * 16, "p" * 48, 2**63 - 1, BlockHash(b"\xff" * 32))
    assert len(key.text.encode()) == 192 <= MAX_KEY_BYTES
    assert key.text.isprintable()
    assert " " not in key.text


def test_domains_and_namespaces_that_differ_in_one_item_differ() -> None:
    tags = [salt_tag(s, a) for s, a in itertools.product([None, "", "a", "b", "ab"], repeat=2)]
    assert len(set(tags)) == len(tags)
    items: list[dict[str, str | int]]
    items = [{"a": 1}, {"a": "1"}, {"b": 1}, {"a": 1, "b": 1}, {"ab": 1}, {}, {"a": "1b"}, {"a": "", "b": ""}]
    spaces = [namespace_digest(entry) for entry in items]
    assert len(set(spaces)) == len(spaces)


@pytest.mark.parametrize("text", ["", "a:b", KEY.text + ":", KEY.text.upper(), KEY.text.replace(":48:", ":048:")])
def test_other_text_is_no_key(text: str) -> None:
    with pytest.raises(ValueError, match="store key"):
        StoreKey.from_text(text)


class Recorder(MemoryStore):
    """Gives the bytes of an object away."""

    def raw(self, key: StoreKey) -> bytes:
        return self._entries[key].payload

    def set_raw(self, key: StoreKey, payload: bytes) -> None:
        self.clear()
        assert self.put([key], [[memoryview(payload)]]) == [Status.OK]


def stored() -> bytes:
    store = Recorder()
    assert put_objects(store, [StoreObject(KEY, 16, views(PARTS))]) == [Status.OK]
    return store.raw(KEY)


def read(payload: bytes, key: StoreKey = KEY, num_tokens: int = 16, parts: list[bytes] = PARTS) -> Status:
    store = Recorder()
    store.set_raw(key, payload)
    [status] = get_objects(store, [StoreObject(key, num_tokens, views([bytes(len(part)) for part in parts]))])
    return status


def test_an_object_is_the_golden_file() -> None:
    assert stored() == GOLDEN.read_bytes()
    assert read(GOLDEN.read_bytes()) is Status.OK
    store = Recorder()
    store.set_raw(KEY, GOLDEN.read_bytes())
    targets = views([bytes(len(part)) for part in PARTS])
    assert get_objects(store, [StoreObject(KEY, 16, targets)]) == [Status.OK]
    assert [bytes(target) for target in targets] == PARTS


def test_the_header_is_as_the_page_says() -> None:
    magic, version, size, num_parts = struct.unpack_from("<8sHHI", stored())
    assert (magic, version, size, num_parts) == (b"DALSEGNO", 1, 96, 3)
    assert stored()[16:48] == KEY.digest
    assert struct.unpack_from("<QQQ", stored(), 48) == (48, 16, 204)
    assert stored()[96:] == b"".join(PARTS)


def test_a_changed_byte_anywhere_is_never_read() -> None:
    whole = stored()
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 0x10
        expected = Status.MISS if position in (8, 9) else Status.CORRUPT
        assert read(bytes(changed)) is expected


def test_what_is_asked_for_differently_is_never_read() -> None:
    other = StoreKey(KEY.namespace, KEY.salt, KEY.part, 64, KEY.block_hash)
    assert read(stored(), key=other) is Status.CORRUPT
    assert read(stored(), num_tokens=15) is Status.CORRUPT
    assert read(stored(), parts=[PARTS[0] + PARTS[2]]) is Status.CORRUPT
    assert read(stored(), parts=[PARTS[0][:199], b"", b"tail?"]) is Status.CORRUPT
    assert read(stored(), parts=[PARTS[0]]) is Status.CORRUPT
