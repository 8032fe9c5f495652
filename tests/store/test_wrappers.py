"""Wrappers: faults where they are asked for, counts, delays; and settings."""

import pytest

from dalsegno.errors import OptionError
from dalsegno.store.base import Status
from dalsegno.store.memory import MemoryStore
from dalsegno.store.objects import StoreObject, get_objects, put_objects
from dalsegno.store.registry import open_store
from dalsegno.store.wrappers.counting import CountingStore
from dalsegno.store.wrappers.faulty import Fault, FaultyStore
from dalsegno.store.wrappers.latency import LatencyStore
from dalsegno.testing.store_contract import make_key, pattern

KEYS = [make_key(number) for number in range(3)]
OBJECTS = [StoreObject(key, 16, [memoryview(pattern(n, 1000))]) for n, key in enumerate(KEYS)]


def targets() -> list[StoreObject]:
    return [StoreObject(key, 16, [memoryview(bytearray(1000))]) for key in KEYS]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault.GET_ERROR, Status.ERROR),
        (Fault.GET_MISS, Status.MISS),
        (Fault.GET_SHORT, Status.CORRUPT),
        (Fault.GET_CORRUPT, Status.CORRUPT),
    ],
)
def test_a_fault_of_get_happens_at_its_call_and_is_noticed(fault: Fault, expected: Status) -> None:
    store = FaultyStore(MemoryStore(), at={1: fault})
    assert put_objects(store, OBJECTS) == [Status.OK] * 3
    assert [get_objects(store, targets()) for _ in range(3)] == [[Status.OK] * 3, [expected] * 3, [Status.OK] * 3]
    assert store.exists(KEYS) == [Status.OK] * 3
    assert store.injected == {fault: 1}


@pytest.mark.parametrize(
    ("fault", "expected", "num_stored"),
    [
        (Fault.PUT_ERROR, [Status.ERROR] * 3, 0),
        (Fault.PUT_NO_ROOM, [Status.NO_ROOM] * 3, 0),
        (Fault.PUT_LAST_NO_ROOM, [Status.OK, Status.OK, Status.NO_ROOM], 2),
    ],
)
def test_a_fault_of_put_happens_at_its_call(fault: Fault, expected: list[Status], num_stored: int) -> None:
    store = FaultyStore(MemoryStore(), at={0: fault})
    assert put_objects(store, OBJECTS) == expected
    assert store.exists(KEYS).count(Status.OK) == num_stored
    assert put_objects(store, OBJECTS).count(Status.OK) == 3 - num_stored


@pytest.mark.parametrize("fault", [Fault.EXISTS_RAISES, Fault.PUT_RAISES, Fault.GET_RAISES])
def test_a_fault_can_raise(fault: Fault) -> None:
    store = FaultyStore(MemoryStore(), rates={fault: 1.0})

    def use() -> None:
        store.exists(KEYS)
        put_objects(store, OBJECTS)
        get_objects(store, targets())

    with pytest.raises(RuntimeError, match="injected"):
        use()
    assert list(store.injected) == [fault]


def test_random_faults_follow_from_the_seed() -> None:
    rates = {Fault.EXISTS_ERROR: 0.3}
    runs = [FaultyStore(MemoryStore(), rates=rates, seed=seed) for seed in (1, 1, 2)]
    found = [[store.exists(KEYS[:1]) for _ in range(100)] for store in runs]
    assert found[0] == found[1] != found[2]
    assert 10 < runs[0].injected[Fault.EXISTS_ERROR] < 60


def test_counting_counts_calls_keys_results_and_bytes() -> None:
    store = CountingStore(MemoryStore())
    put_objects(store, OBJECTS[:2])
    get_objects(store, targets())
    store.exists(KEYS)
    figures = store.stats()
    assert (figures["put_calls"], figures["put_keys"], figures["put_ok"], figures["put_ok_bytes"]) == (1, 2, 2, 2192)
    assert (figures["get_ok"], figures["get_miss"], figures["get_ok_bytes"]) == (2, 1, 2192)
    assert (figures["exists_calls"], figures["exists_ok"], figures["exists_miss"]) == (1, 2, 1)


def test_latency_is_per_call_and_per_byte() -> None:
    waited: list[float] = []
    store = LatencyStore(MemoryStore(), 0.5, bytes_per_s=1000.0, sleep=waited.append)
    store.put(KEYS[:2], [[memoryview(bytes(250))], [memoryview(bytes(250)), memoryview(bytes(500))]])
    store.exists(KEYS)
    assert waited == [1.5, 0.5]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"store": "lmdb"}, "store must be one of embedded, memory, mooncake"),
        ({"store": "embedded"}, "needs path="),
        ({"store": "embedded", "path": "x", "size": 1}, "no option 'size'"),
        ({"store": "embedded", "path": "x", "bytes": 1.5}, "bytes must be an integer"),
        ({"store": "memory", "path": "x"}, "no option 'path'"),
        ({"store": "memory", "bytes": 10}, "bytes must be an integer of at least"),
    ],
)
def test_unknown_stores_and_settings_are_refused_by_name(settings: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        open_store(settings)
