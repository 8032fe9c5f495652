"""What the store has lost without a word, to eviction or a restart, is noticed and stored again."""

import random
from collections.abc import Sequence

import pytest

from dalsegno.store.base import Buffers, Status
from dalsegno.store.keys import StoreKey
from dalsegno.store.memory import MemoryStore
from dalsegno.store.wrappers.faulty import Fault, FaultyStore
from tests.connector.engines import VOCABULARY, StoreEngine

PROMPT = random.Random(1).choices(range(VOCABULARY), k=300)
LONGER = [*PROMPT, *random.Random(2).choices(range(VOCABULARY), k=90)]


def answer(engine: StoreEngine, prompt: Sequence[int]) -> int:
    """The boundary that the answer says is stored."""
    request = engine.send(prompt, 1, kv_transfer_params={"do_remote_decode": True})
    assert request.kv_transfer_answer is not None
    return int(request.kv_transfer_answer["stored_boundary"])


def hit_elsewhere(store: MemoryStore, prompt: Sequence[int], kinds: str) -> int | None:
    with StoreEngine(store, kinds, role="kv_consumer", save_decode_cache=False) as engine:
        return engine.send(prompt, 3).num_cached_tokens


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kinds", ["as", "a", "aws", "s"])
@pytest.mark.parametrize("prompt", [PROMPT, LONGER], ids=["again", "longer"])
def test_a_store_that_has_lost_everything_has_it_again_when_the_answer_comes(
    kinds: str, prompt: list[int], world_size: int
) -> None:
    """69: the producer's own cache hits, and what the store had before its restart is not trusted."""
    store = MemoryStore()
    with StoreEngine(store, kinds, role="kv_producer", world_size=world_size) as engine:
        assert answer(engine, PROMPT) == 288
        before = set(store._entries)
        store.clear()
        assert answer(engine, prompt) == len(prompt) // 16 * 16
        assert prompt is LONGER or set(store._entries) == before
        assert engine.core.stats()["kv_offload_lost_objects"] > 0
        engine.settle()
        with StoreEngine(store, kinds, world_size=world_size) as other:
            assert other.send(prompt, 3).num_cached_tokens == (len(prompt) - 1) // 16 * 16


@pytest.mark.parametrize("kinds", ["as", "a", "aws", "s"])
def test_any_single_object_that_is_lost_is_stored_again_by_the_next_turn(kinds: str) -> None:
    """68: the later turn fills the hole; ordinary requests, nobody asks what is stored."""
    store = MemoryStore()
    with StoreEngine(store, kinds) as engine:
        engine.send(PROMPT, 1)
        engine.settle()
        first = list(store._entries)
        engine.send(LONGER, 1)
        engine.settle()
        needed = [key for key in store._entries if key.boundary <= 288 or key not in first]
    for lost in needed:
        store = MemoryStore()
        with StoreEngine(store, kinds) as engine:
            engine.send(PROMPT, 1)
            engine.settle()
            store.remove([lost])
            engine.send(LONGER, 1)
            engine.settle()
        assert hit_elsewhere(store, LONGER, kinds) == 384, lost


@pytest.mark.parametrize("kinds", ["as", "a"])
def test_what_the_device_has_lost_too_is_computed_and_stored_again(kinds: str) -> None:
    store = MemoryStore()
    with StoreEngine(store, kinds, num_slabs=40, max_model_len=600) as engine:
        assert answer(engine, PROMPT) == 288
        for seed in range(8):
            engine.send(random.Random(f"other {seed}").choices(range(VOCABULARY), k=400), 1)
        engine.settle()
        store.clear()
        assert answer(engine, PROMPT) == 288
        engine.settle()
        assert hit_elsewhere(store, PROMPT, kinds) == 288


class Forgetful(MemoryStore):
    """Loses every object as soon as it was put."""

    def put(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        statuses = super().put(keys, buffers)
        self.clear()
        return statuses


def test_a_store_that_loses_everything_at_once_is_not_tried_for_ever() -> None:
    with StoreEngine(Forgetful()) as engine:
        for _ in range(5):
            answer(engine, PROMPT)
            answer(engine, LONGER)
        engine.settle()
        stats = engine.core.stats()
        assert stats["kv_offload_jobs"] < 60
        assert stats["kv_offload_lost_objects"] > 0


@pytest.mark.parametrize("fault", [Fault.EXISTS_ERROR, Fault.EXISTS_RAISES])
def test_what_cannot_be_confirmed_is_not_said_to_be_stored(fault: Fault) -> None:
    memory = MemoryStore()
    store = FaultyStore(memory)
    with StoreEngine(store) as engine:
        assert answer(engine, PROMPT) == 288
        store._rates[fault] = 1.0
        assert answer(engine, PROMPT) == 0
        store._rates.clear()
        assert answer(engine, PROMPT) == 288


def test_what_is_stored_is_confirmed_while_there_is_no_room_for_more() -> None:
    memory = MemoryStore()
    store = FaultyStore(memory)
    with StoreEngine(store, pressure_pause_s=1e9) as engine:
        assert answer(engine, PROMPT) == 288
        store._rates[Fault.PUT_NO_ROOM] = 1.0
        assert answer(engine, LONGER) == 288
        assert answer(engine, PROMPT) == 288
        memory.clear()
        assert answer(engine, PROMPT) == 0
