"""What the store has lost without a word, to eviction or a restart, is noticed and stored again."""

import random
from collections.abc import Sequence

import pytest

from dalsegno.store.base import Buffers, Status
from dalsegno.store.keys import StoreKey
from dalsegno.store.memory import MemoryStore
from dalsegno.store.wrappers.faulty import Fault, FaultyStore
from dalsegno.store.wrappers.latency import LatencyStore
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


@pytest.mark.parametrize("fault", [Fault.PUT_NO_ROOM, Fault.PUT_ERROR, Fault.EXISTS_RAISES])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_shorter_boundary_is_not_said_to_be_stored_for_having_been_once(fault: Fault, world_size: int) -> None:
    memory = MemoryStore()
    store = FaultyStore(memory)
    with StoreEngine(store, world_size=world_size) as engine:
        assert answer(engine, PROMPT[:40]) == 32
        assert answer(engine, PROMPT) == 288
        memory.clear()
        store._rates[fault] = 1.0
        assert answer(engine, LONGER) == 0


def test_who_stores_nothing_is_told_what_the_store_has() -> None:
    store = MemoryStore()
    with StoreEngine(store) as engine:
        asks = {"do_remote_decode": True}
        assert answer(engine, PROMPT) == 288
        request = engine.send(LONGER, 1, no_store=True, kv_transfer_params=asks)
        assert request.kv_transfer_answer == {"do_remote_prefill": True, "stored_boundary": 288}
        store.clear()
        request = engine.send(LONGER, 1, no_store=True, kv_transfer_params=asks)
        assert request.kv_transfer_answer == {"do_remote_prefill": True, "stored_boundary": 0}
        assert not store._entries


PUT_FAULTS = (Fault.PUT_ERROR, Fault.PUT_NO_ROOM, Fault.PUT_LAST_NO_ROOM, Fault.PUT_RAISES)


@pytest.mark.parametrize("seed", range(16))
def test_no_answer_says_more_than_another_engine_finds(seed: int) -> None:
    """Objects go missing before a request, and while it runs the store may fail."""
    rng = random.Random(seed)
    memory = MemoryStore()
    store = FaultyStore(memory)
    kinds, size = rng.choice(("as", "a", "aws", "s")), rng.randint(1, 3)
    bases = [rng.choices(range(VOCABULARY), k=length) for length in (40, 100, 300)]
    told = 0
    pause = rng.choice((0.001, 1.0))
    with StoreEngine(store, kinds, world_size=size, pressure_pause_s=pause, num_slabs=80, max_model_len=700) as engine:
        for _ in range(12):
            left = list(memory._entries)
            memory.remove(rng.sample(left, min(len(left), rng.choice((0, 1, 3, 1000)))))
            faults = (None, None, *PUT_FAULTS, Fault.EXISTS_ERROR, Fault.EXISTS_RAISES)
            if fault := rng.choice(faults):
                store._rates[fault] = rng.choice((0.5, 1.0))
            base = rng.choice(bases)
            prompt = base[: rng.randint(17, len(base))] + rng.choices(range(VOCABULARY), k=rng.choice((0, 1, 40)))
            asks = {"do_remote_decode": True}
            request = engine.send(prompt, rng.choice((1, 20)), kv_transfer_params=asks)
            store._rates.clear()
            boundary = (request.kv_transfer_answer or {})["stored_boundary"]
            told += boundary
            with StoreEngine(memory, kinds, world_size=size, role="kv_consumer", save_decode_cache=False) as other:
                found = other.send([*list(request.token_ids)[:boundary], *[5] * 17], 1)
            assert (found.num_cached_tokens or 0) >= boundary
        engine.settle()
        assert not engine.core.manager.pins.counts
        assert not engine.core.connection.connector._jobs._confirmed  # type: ignore[attr-defined]
    assert told


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (None, "store_miss"),
        (Fault.EXISTS_ERROR, "store_error"),
        (Fault.EXISTS_RAISES, "store_error"),
        (Fault.GET_MISS, "load_failed"),
    ],
)
def test_a_lost_token_tells_whether_the_store_said_no_said_nothing_or_did_not_deliver(
    fault: Fault | None, reason: str
) -> None:
    """R10"""
    memory = MemoryStore()
    if fault is not None:
        with StoreEngine(memory) as engine:
            engine.send(PROMPT)
            engine.settle()
    store = FaultyStore(memory, rates={} if fault is None else {fault: 1.0})
    with StoreEngine(store, role="kv_consumer", save_decode_cache=False) as engine:
        request = engine.send(PROMPT, 3)
    assert request.hit_report.lost == {reason: 288, "sub_unit": 12}


def test_a_lookup_that_is_not_answered_in_time_is_no_miss() -> None:
    store = LatencyStore(MemoryStore(), 0.2)
    with StoreEngine(store, role="kv_consumer", lookup_async=True, lookup_timeout_s=0.001) as engine:
        assert engine.send(PROMPT, 3).hit_report.lost == {"store_error": 288, "sub_unit": 12}
