"""Keys say everything that matters (R8): engines that differ in one item never meet, those that agree always do."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dalsegno.config import CacheConfig
from dalsegno.connector.registry import ConnectorContext
from dalsegno.connector.store.keys import KeyMaker
from dalsegno.connector.store.messages import StoredObject
from dalsegno.hashing.block_hash import root_hash
from dalsegno.kv.layout import plan_layout
from dalsegno.store.keys import MAX_KEY_BYTES, StoreKey, salt_tag
from dalsegno.store.memory import MemoryStore
from dalsegno.testing.builders import layer_specs
from dalsegno.testing.fake_worker import FakeClock
from dalsegno.types import BlockHash, CachePart, LayerCacheSpec
from tests.connector.engines import VOCABULARY, StoreEngine

BASE: Mapping[str, Any] = {
    "identity": {"weights": "w", "config": "c", "dtype": "float32"},
    "block_size": 32,
    "hash_block_size": 16,
    "object_tokens": 64,
    "rank": 0,
    "world_size": 2,
    "cache_prefix": "",
    "layers": layer_specs("aws"),
}


def identity(**changed: str) -> dict[str, str]:
    return {**BASE["identity"], **changed}


def edited(layer: int, /, **fields: Any) -> list[LayerCacheSpec]:
    layers = layer_specs("aws")
    layers[layer] = replace(layers[layer], **fields)
    return layers


def with_part(layer: int, /, **fields: Any) -> list[LayerCacheSpec]:
    parts = layer_specs("aws")[layer].parts
    return edited(layer, parts=(replace(parts[0], **fields), *parts[1:]))


ONE_ITEM: Mapping[str, Mapping[str, Any]] = {
    "nothing": {},
    "weights": {"identity": identity(weights="v")},
    "config": {"identity": identity(config="d")},
    "dtype": {"identity": identity(dtype="bfloat16")},
    "weights and config exchanged": {"identity": identity(weights="c", config="w")},
    "an item more": {"identity": identity(revision="")},
    "block size": {"block_size": 64},
    "hash block size": {"hash_block_size": 32},
    "object size": {"object_tokens": 128},
    "rank": {"rank": 1},
    "world size": {"world_size": 1},
    "world size 4": {"world_size": 4},
    "cache prefix": {"cache_prefix": "a"},
    "cache prefix of one space": {"cache_prefix": " "},
    "one attention layer more": {"layers": layer_specs("awsa")},
    "one state layer more": {"layers": layer_specs("awss")},
    "layers in another order": {"layers": layer_specs("swa")},
    "no window layer": {"layers": layer_specs("as")},
    "a window layer for an attention layer": {"layers": layer_specs("wws")},
    "window": {"layers": layer_specs("aws", window=41)},
    "state width": {"layers": layer_specs("aws", state_width=128)},
    "layer number": {"layers": edited(2, layer=3)},
    "KV dtype": {"layers": with_part(0, dtype="bfloat16")},
    "KV shape": {"layers": with_part(0, shape=(2, 2))},
    "KV part name": {"layers": with_part(0, name="keys")},
    "state dtype": {"layers": with_part(2, dtype="bfloat16")},
    "state shape, transposed": {"layers": with_part(2, shape=(64, 1, 4))},
    "a part more": {"layers": edited(2, parts=(*layer_specs("s")[0].parts, CachePart("conv", (4,), "float32")))},
}


def key_maker(item: str) -> KeyMaker:
    given = {**BASE, **ONE_ITEM[item]}
    unit = given["hash_block_size"]
    config = CacheConfig(given["block_size"], unit, decode_checkpoint_interval=unit)
    layout = plan_layout(given["layers"], config, num_slabs=8)
    context = ConnectorContext(layout, config, given["identity"], FakeClock(), [given["rank"]], given["world_size"])
    return KeyMaker(context, given["rank"], given["object_tokens"], given["cache_prefix"])


def test_engines_that_differ_in_one_item_have_different_namespaces() -> None:
    """70"""
    namespaces = {item: key_maker(item).namespaces for item in ONE_ITEM}
    assert all(len(own) == 1 for own in namespaces.values())
    assert len({own[0] for own in namespaces.values()}) == len(ONE_ITEM), namespaces


def test_engines_that_agree_have_one_namespace_whatever_their_memory_and_rest() -> None:
    config = CacheConfig(BASE["block_size"], BASE["hash_block_size"], max_states_per_request=3)
    identity = dict(reversed(BASE["identity"].items()))
    for num_slabs in (4, 100):
        context = ConnectorContext(
            plan_layout(BASE["layers"], config, num_slabs=num_slabs), config, identity, FakeClock()
        )
        maker = KeyMaker(replace(context, world_size=2), 0, 64, "")
        assert maker.namespaces == key_maker("nothing").namespaces


def test_golden_namespace_and_key() -> None:
    """A change of what a key or the bytes behind it mean must raise `KEY_FORMAT`, and shows here."""
    maker = key_maker("nothing")
    assert maker.namespaces == ["125e3a20ff165b1bce04203a72cd5d8a"]
    key = maker.key(salt_tag("tenant"), StoredObject(2, 0, 48, BlockHash(bytes(range(32)))))
    assert key.text == (
        "dalsegno:125e3a20ff165b1bce04203a72cd5d8a:253e4a25baca4aed:state:48:000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    )


def test_keys_hold_at_most_200_bytes_and_say_group_boundary_hash_and_salt() -> None:
    maker = key_maker("nothing")
    hashes = [BlockHash(bytes([n]) * 32) for n in range(2)]
    salts = [salt_tag(None), salt_tag("x" * 128)]
    keys = {
        maker.key(salt, StoredObject(group, 0, boundary, block_hash))
        for group in range(3)
        for boundary in (16, 2**40)
        for block_hash in hashes
        for salt in salts
    }
    assert len({key.text for key in keys}) == len({key.digest for key in keys}) == len(keys) == 24
    assert max(len(key.text.encode()) for key in keys) <= MAX_KEY_BYTES == 200
    assert {StoreKey.from_text(key.text) for key in keys} == keys


DOMAINS = [(None, None), ("a", None), (None, "a"), ("a", "a"), ("", None), (None, ""), ("aa", None), ("a", "")]


def test_salt_and_adapter_are_different_domains_in_hash_and_tag() -> None:
    """82: also where the text is the same."""
    assert len({root_hash(16, salt, adapter) for salt, adapter in DOMAINS}) == len(DOMAINS)
    assert len({salt_tag(salt, adapter) for salt, adapter in DOMAINS}) == len(DOMAINS)


SCRIPT = """
from tests.connector.test_keys import key_maker, ONE_ITEM
from dalsegno.connector.store.messages import StoredObject
from dalsegno.hashing.block_hash import root_hash
from dalsegno.store.keys import salt_tag
for item in ONE_ITEM:
    print(key_maker(item).key(salt_tag("s"), StoredObject(0, 0, 32, root_hash(16, "s"))).digest.hex())
"""


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_no_process_and_no_hash_seed_changes_a_key(seed: str) -> None:
    """81"""
    here = [key_maker(i).key(salt_tag("s"), StoredObject(0, 0, 32, root_hash(16, "s"))).digest.hex() for i in ONE_ITEM]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == here


# Engines on one store.

PROMPT = [(7 * n) % VOCABULARY for n in range(150)]
DIFFERENT: Mapping[str, Mapping[str, Any]] = {
    "weights": {"identity": {"weights": "v", "config": "c", "dtype": "int64"}},
    "config": {"identity": {"weights": "w", "config": "d", "dtype": "int64"}},
    "dtype": {"identity": {"weights": "w", "config": "c", "dtype": "int32"}},
    "block size": {"block_size": 16},
    "hash block size": {"hash_block_size": 32},
    "store block size": {"store_block_size": 96},
    "cache prefix": {"cache_prefix": "other"},
    "more layers": {"kinds": "ass"},
    "a window layer": {"kinds": "aws"},
}


@pytest.mark.parametrize("item", DIFFERENT)
@pytest.mark.parametrize("is_writer", [False, True])
def test_engines_that_differ_in_one_item_never_hit_each_other(item: str, is_writer: bool) -> None:
    """70: in either direction."""
    store = MemoryStore(1 << 30)
    options: list[Mapping[str, Any]] = [{}, DIFFERENT[item]]
    writer, reader = reversed(options) if is_writer else options
    for index, (option, hit) in enumerate([(writer, 0), (reader, 0), (writer, 144), (reader, 144)]):
        with StoreEngine(store, **option) as engine:
            sent = engine.send(PROMPT, 3)
            unit = option.get("hash_block_size", 16)
            assert sent.num_cached_tokens == hit // unit * unit, (index, sent.hit_report)
            engine.settle()


def test_no_salt_hits_another_in_the_store() -> None:
    """82"""
    store = MemoryStore(1 << 30)
    salts = [None, "a", "b", "A", "a "]
    for expected in (0, 144):
        for salt in salts:
            with StoreEngine(store) as engine:
                assert engine.send(PROMPT, 3, cache_salt=salt).num_cached_tokens == expected
                engine.settle()


def test_clearing_one_salt_leaves_the_others() -> None:
    """80: a reset of one domain does not wipe the other."""
    store = MemoryStore(1 << 30)
    for salt in ("a", "b"):
        with StoreEngine(store) as engine:
            engine.send(PROMPT, 3, cache_salt=salt)
            engine.settle()
    assert store.clear(salt=salt_tag("a")) > 0
    with StoreEngine(store, save_decode_cache=False, role="kv_consumer") as engine:
        assert engine.send(PROMPT, 3, cache_salt="a").num_cached_tokens == 0
        assert engine.send(PROMPT, 3, cache_salt="b").num_cached_tokens == 144
