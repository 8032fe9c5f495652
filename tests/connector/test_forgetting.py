"""A chain whose bytes were found to be wrong leaves the store too."""

import random

import pytest

from dalsegno.store.memory import MemoryStore
from tests.connector.engines import StoreEngine


@pytest.mark.parametrize("kinds", ["as", "aws", "a"])
def test_a_forgotten_chain_and_what_begins_like_it_is_found_nowhere_until_computed_again(kinds: str) -> None:
    rng = random.Random(0)
    shared, ours, theirs, others = (rng.choices(range(900), k=count) for count in (70, 50, 60, 80))
    store = MemoryStore()
    with StoreEngine(store, kinds) as engine:
        wrong = engine.send([*shared, *ours], 20, checkpoint_at=(40, 64))
        engine.send([*shared, *theirs], 20)
        engine.send(others, 20)
        engine.settle()
        engine.core.manager.forget_chain(wrong)
        engine.settle()
    with StoreEngine(store, kinds, role="kv_consumer") as engine:
        assert engine.send([*shared, *ours], 3).num_cached_tokens == 0
        assert engine.core.reset_prefix_cache()
        assert engine.send([*shared, *theirs], 3).num_cached_tokens == 0
        assert engine.send(others, 3).num_cached_tokens == 64
    with StoreEngine(store, kinds) as engine:
        engine.send([*shared, *ours], 3)
        engine.settle()
    with StoreEngine(store, kinds) as engine:
        assert engine.send([*shared, *ours], 3).num_cached_tokens == 112
