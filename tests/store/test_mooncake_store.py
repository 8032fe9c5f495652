"""The Mooncake store on a fake client: the contract, codes as statuses, memory, an absent master, closing."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.errors import EngineError
from dalsegno.store.base import Status
from dalsegno.store.mooncake import MooncakeStore
from dalsegno.store.mooncake.codes import Code
from dalsegno.store.mooncake.memory import ARENA_BYTES, SMALL_BYTES
from dalsegno.store.objects import StoreObject, get_objects, put_objects
from dalsegno.testing.fake_mooncake import FakeMooncakeClient, FakeMooncakeMaster
from dalsegno.testing.store_contract import ROOM_BYTES, StoreContract, make_key, pattern

KEYS = [make_key(number) for number in range(8)]
PAYLOADS = [pattern(number, 1000 + number) for number in range(8)]


def make_store(client: FakeMooncakeClient) -> MooncakeStore:
    return MooncakeStore(client, probe_interval_s=0.01, close_timeout_s=5.0)


@pytest.fixture
def master() -> FakeMooncakeMaster:
    return FakeMooncakeMaster()


@pytest.fixture
def client(master: FakeMooncakeMaster) -> FakeMooncakeClient:
    return FakeMooncakeClient(master, ROOM_BYTES, must_register=True)


@pytest.fixture
def store(client: FakeMooncakeClient) -> Iterator[MooncakeStore]:
    store = make_store(client)
    yield store
    store.close()
    assert client.used_after_close == []
    assert client.regions == {}


def put(store: MooncakeStore, numbers: Sequence[int] = range(8)) -> list[Status]:
    return store.put([KEYS[n] for n in numbers], [[memoryview(PAYLOADS[n])] for n in numbers])


def test_that_nobody_lends_is_said_once(master: FakeMooncakeMaster, caplog: pytest.LogCaptureFixture) -> None:
    store = make_store(FakeMooncakeClient(master, 0))
    assert put(store) == put(store) == [Status.NO_ROOM] * 8
    assert [record.getMessage() for record in caplog.records] == [
        "the Mooncake master had no room for the first object: does anybody lend it memory?"
    ]
    store.close()


def test_that_a_store_is_full_is_no_warning(store: MooncakeStore, caplog: pytest.LogCaptureFixture) -> None:
    assert put(store) == [Status.OK] * 8
    large = bytes(2 * ROOM_BYTES)
    assert store.put([make_key(100)], [[memoryview(large)]]) == [Status.NO_ROOM]
    assert not caplog.records


def get(store: MooncakeStore, numbers: Sequence[int] = range(8)) -> list[Status]:
    """Read objects; those that are OK hold their bytes, or this raises."""
    targets = [bytearray(len(PAYLOADS[n])) for n in numbers]
    statuses = store.get([KEYS[n] for n in numbers], [[memoryview(target)] for target in targets])
    for number, target, status in zip(numbers, targets, statuses, strict=True):
        assert status is not Status.OK or target == PAYLOADS[number]
    return statuses


def assert_set(event: threading.Event) -> None:
    assert event.wait(20)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "this should have happened"
        time.sleep(0.001)


class TestFakeMooncake(StoreContract):
    tells_existing = False

    @pytest.fixture
    def store(self) -> Iterator[MooncakeStore]:
        client = FakeMooncakeClient(FakeMooncakeMaster(), ROOM_BYTES, must_register=True)
        store = make_store(client)
        yield store
        store.close()
        assert client.used_after_close == []


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (-704, Status.MISS),
        (-703, Status.MISS),
        (-707, Status.ERROR),
        (-801, Status.CORRUPT),
        (-1, Status.ERROR),
        (-12345, Status.ERROR),
        (0, Status.ERROR),
        (None, Status.ERROR),
        (1000, Status.CORRUPT),
        (1002, Status.CORRUPT),
        (1001, Status.OK),
    ],
)
def test_what_a_read_returns_is_that_keys_alone(
    store: MooncakeStore, client: FakeMooncakeClient, code: int | None, status: Status
) -> None:
    put(store, range(3))
    client.answers["batch_get_into_multi_buffers"] = [1000, code, 1002]
    assert get(store, range(3)) == [Status.OK, status, Status.OK]
    assert get(store, range(3)) == [Status.OK] * 3


@pytest.mark.parametrize("codes", [[], [0, 0], [0, 0, 0, 0], None])
def test_a_wrong_number_of_answers_is_an_error_of_all(
    store: MooncakeStore, client: FakeMooncakeClient, codes: list[int | None]
) -> None:
    client.answers["batch_put_from_multi_buffers"] = codes or []
    assert put(store, range(3)) == [Status.ERROR] * 3


def test_a_client_that_raises_is_an_error_and_nothing_more(store: MooncakeStore, client: FakeMooncakeClient) -> None:
    def fail() -> None:
        raise RuntimeError("from the package")

    put(store, [0])
    client.hooks["exists"].append(fail)
    assert store.exists(KEYS[:2]) == [Status.ERROR] * 2
    assert store.exists(KEYS[:2]) == [Status.OK, Status.MISS]


def test_a_put_refused_in_the_middle_of_a_batch_is_that_objects_alone(
    store: MooncakeStore, client: FakeMooncakeClient
) -> None:
    client.answers["batch_put_from_multi_buffers"] = [0, 0, -200, 0, -705, -800, 0, 0]
    found = put(store)
    assert found[2:6] == [Status.NO_ROOM, Status.OK, Status.EXISTS, Status.ERROR]
    assert [found[n] for n in (0, 1, 6, 7)] == [Status.OK] * 4
    figures = store.stats()
    assert (figures["no_room"], figures["put_no_available_handle"], figures["put_transfer_fail"]) == (1, 1, 1)


def test_a_full_segment_refuses_what_does_not_fit_and_takes_it_when_there_is_room(master: FakeMooncakeMaster) -> None:
    store = make_store(FakeMooncakeClient(master, 3500))
    assert put(store, range(5)) == [Status.OK] * 3 + [Status.NO_ROOM] * 2
    assert store.exists(KEYS[:1]) == [Status.OK]
    master.evict()
    assert put(store, [3, 4]) == [Status.OK] * 2
    assert get(store, range(5)) == [Status.OK, Status.MISS, Status.MISS, Status.OK, Status.OK]
    store.close()


def test_an_object_evicted_after_exists_is_a_miss(
    store: MooncakeStore, client: FakeMooncakeClient, master: FakeMooncakeMaster
) -> None:
    put(store, range(3))
    assert store.exists(KEYS[:3]) == [Status.OK] * 3
    client.hooks["get"].append(lambda: master.evict(KEYS[1].text))
    assert get(store, range(3)) == [Status.OK, Status.MISS, Status.OK]


def test_bytes_read_beyond_their_lease_are_thrown_away(
    store: MooncakeStore, client: FakeMooncakeClient, master: FakeMooncakeMaster
) -> None:
    put(store, range(2))

    def outlive() -> None:
        master.now += master.lease_s + 1

    client.hooks["copied"].append(outlive)
    target = bytearray(1000)
    assert store.get(KEYS[:1], [[memoryview(target)]]) == [Status.ERROR]
    assert target == bytes(1000), "what goes through an arena is not even written"
    assert store.stats()["lease_expired"] == store.stats()["get_lease_expired"] == 1
    assert get(store, range(2)) == [Status.OK] * 2


def test_an_owner_that_dies_costs_what_lay_there(master: FakeMooncakeMaster) -> None:
    owner, reader = FakeMooncakeClient(master, ROOM_BYTES), FakeMooncakeClient(master)
    store = make_store(reader)
    put(store, range(3))
    reader.hooks["copied"] += [lambda: None, owner.die]
    assert get(store, range(3)) == [Status.OK, Status.ERROR, Status.ERROR]
    assert store.exists(KEYS[:3]) == [Status.OK] * 3
    assert put(store, [4]) == [Status.ERROR]
    master.forget_dead()
    assert store.exists(KEYS[:3]) == [Status.MISS] * 3
    FakeMooncakeClient(master, ROOM_BYTES)
    assert put(store, range(3)) == [Status.OK] * 3
    assert get(store, range(3)) == [Status.OK] * 3
    store.close()


def test_an_object_is_invisible_while_it_is_written(
    store: MooncakeStore, client: FakeMooncakeClient, master: FakeMooncakeMaster
) -> None:
    other = make_store(FakeMooncakeClient(master))
    seen: list[Status] = []
    client.hooks["put"].append(lambda: seen.extend([*other.exists(KEYS[:1]), *get(other, [0])]))
    assert put(store, [0]) == [Status.OK]
    assert seen == [Status.MISS, Status.MISS]
    assert get(other, [0]) == [Status.OK]
    other.close()


def test_remove_and_clear_leave_what_is_not_ours(store: MooncakeStore, master: FakeMooncakeMaster) -> None:
    put(store, range(2))
    foreign = "vllm@" + KEYS[0].text
    master.objects[foreign] = master.objects[KEYS[0].text]
    assert store.exists(KEYS[:1]) == [Status.OK], "which grants a lease"
    assert store.remove(KEYS[:1]) == [Status.OK]
    assert store.clear() == 1
    assert list(master.objects) == [foreign]


def test_large_pieces_of_announced_memory_are_not_copied(store: MooncakeStore, client: FakeMooncakeClient) -> None:
    memory = memoryview(bytearray(12 * SMALL_BYTES))
    store.register(memory)
    store.register(memory)
    store.register(memory[5:100])
    assert client.num_calls["register_buffer"] == 1
    half = 6 * SMALL_BYTES
    memory[:half] = pattern(1, half)
    # Not at its beginning, and of several pieces.
    pieces = [memory[7 : 3 * SMALL_BYTES], memory[3 * SMALL_BYTES : half - 13]]
    targets = [memory[half : half + 2 * SMALL_BYTES], memory[half + 2 * SMALL_BYTES : half + half - 20]]
    assert store.put(KEYS[:1], [[piece.toreadonly() for piece in pieces]]) == [Status.OK]
    assert store.get(KEYS[:1], [targets]) == [Status.OK]
    assert memory[half : half + half - 20] == memory[7 : half - 13]
    assert client.num_calls["register_buffer"] == 1
    assert client.max_pieces == 2


@pytest.mark.parametrize("start", [0, 999, 1500, 900, 2000])
def test_memory_beside_what_was_announced_is_copied(
    store: MooncakeStore, client: FakeMooncakeClient, start: int
) -> None:
    unit = SMALL_BYTES // 500
    memory = memoryview(bytearray(pattern(1, 3000 * unit)))
    store.register(memory[1000 * unit : 2000 * unit])
    piece = memory[start * unit : start * unit + SMALL_BYTES + 1]
    assert store.put(KEYS[:1], [[piece]]) == [Status.OK]
    target = bytearray(piece.nbytes)
    assert store.get(KEYS[:1], [[memoryview(target)]]) == [Status.OK]
    assert target == piece
    assert client.num_calls["register_buffer"] == 2


def test_memory_that_cannot_be_registered_is_copied(store: MooncakeStore, client: FakeMooncakeClient) -> None:
    memory = memoryview(bytearray(pattern(1, 3 * SMALL_BYTES)))
    store.register(memory[: 2 * SMALL_BYTES])
    store.register(memory[SMALL_BYTES:])  # overlaps
    assert store.put(KEYS[:1], [[memory[SMALL_BYTES + 5 :]]]) == [Status.OK]
    target = bytearray(2 * SMALL_BYTES - 5)
    assert store.get(KEYS[:1], [[memoryview(target)]]) == [Status.OK]
    assert target == memory[SMALL_BYTES + 5 :]


@given(
    sizes=st.lists(st.sampled_from([0, 1, 96, 5000, SMALL_BYTES - 1, SMALL_BYTES, SMALL_BYTES + 1]), max_size=12),
    outside=st.lists(st.booleans(), min_size=12, max_size=12),
    cuts=st.lists(st.integers(0, 10 * SMALL_BYTES), max_size=6),
)
def test_any_mix_of_pieces_comes_back(sizes: list[int], outside: list[bool], cuts: list[int]) -> None:
    client = FakeMooncakeClient(FakeMooncakeMaster(), 2 * ROOM_BYTES, must_register=True)
    store = make_store(client)
    payload = pattern(len(sizes), sum(sizes) + 1)
    registered = memoryview(bytearray(payload))
    store.register(registered)
    ends = [0, *itertools.accumulate(sizes), len(payload)]
    pieces = [
        memoryview(payload[start:end]) if is_outside else registered[start:end]
        for (start, end), is_outside in zip(itertools.pairwise(ends), [*outside, True], strict=False)
    ]
    assert store.put(KEYS[:1], [pieces]) == [Status.OK]
    target = memoryview(bytearray(len(payload)))
    store.register(target)
    places = sorted(min(cut, len(payload)) for cut in cuts)
    assert store.get(KEYS[:1], [[target[a:b] for a, b in itertools.pairwise([0, *places, len(payload)])]]) == [
        Status.OK
    ]
    assert target == payload
    store.close()
    assert client.regions == {}


def test_no_call_of_the_client_has_many_pieces(master: FakeMooncakeMaster) -> None:
    client = FakeMooncakeClient(master, 2**26, must_register=True)
    store = make_store(client)
    memory = memoryview(bytearray(40 * SMALL_BYTES))
    memory[:] = pattern(1, len(memory))
    store.register(memory)
    large = [memory[at : at + SMALL_BYTES] for at in range(0, len(memory), SMALL_BYTES)]
    small = [memory[at : at + 100] for at in range(0, 60_000, 100)]
    objects = [large, small, [*large[:3], *small], *([piece] for piece in large * 4)]
    keys = [make_key(number) for number in range(len(objects))]
    targets = [bytearray(sum(map(len, pieces))) for pieces in objects]
    assert store.put(keys, objects) == [Status.OK] * len(keys)
    assert store.get(keys, [[memoryview(target)] for target in targets]) == [Status.OK] * len(keys)
    assert targets == [b"".join(pieces) for pieces in objects]
    assert 100 < client.max_pieces <= 128
    store.close()


def test_without_a_limit_for_small_pieces_only_what_is_not_announced_or_too_much_is_copied(
    master: FakeMooncakeMaster,
) -> None:
    client = FakeMooncakeClient(master, ROOM_BYTES, must_register=True)
    store = MooncakeStore(client, small_bytes=0)
    memory = memoryview(bytearray(pattern(1, 30_000)))
    store.register(memory)
    for number, num_pieces in enumerate((50, 300)):
        size = len(memory) // num_pieces
        pieces = [memory[at : at + size] for at in range(0, len(memory), size)]
        target = bytearray(len(memory))
        assert store.put([KEYS[number]], [pieces]) == [Status.OK]
        assert store.get([KEYS[number]], [[memoryview(target)]]) == [Status.OK]
        assert target == memory
        assert client.max_pieces == 50
    store.close()


def test_more_than_an_arena_holds_goes_in_turns_or_through_one_of_its_own(master: FakeMooncakeMaster) -> None:
    client = FakeMooncakeClient(master, 8 * ARENA_BYTES, must_register=True)
    store = make_store(client)
    sizes = [ARENA_BYTES // 3] * 7 + [2 * ARENA_BYTES, 1, ARENA_BYTES]
    keys = [make_key(number) for number in range(len(sizes))]
    payloads = [pattern(number, size) for number, size in enumerate(sizes)]
    assert store.put(keys, [[memoryview(payload)] for payload in payloads]) == [Status.OK] * len(keys)
    targets = [bytearray(size) for size in sizes]
    assert store.get(keys, [[memoryview(target)] for target in targets]) == [Status.OK] * len(keys)
    assert [bytes(target) for target in targets] == payloads
    assert list(client.regions.values()) == [ARENA_BYTES], "one arena is kept"
    assert store.stats()["registered_bytes"] == ARENA_BYTES
    store.close()


def test_an_object_with_a_wrong_header_is_noticed_whoever_put_it(
    store: MooncakeStore, master: FakeMooncakeMaster
) -> None:
    whole = StoreObject(KEYS[0], 16, [memoryview(PAYLOADS[0])])
    assert put_objects(store, [whole]) == [Status.OK]
    master.objects[KEYS[0].text].payload[500] ^= 1
    assert get_objects(store, [StoreObject(KEYS[0], 16, [memoryview(bytearray(1000))])]) == [Status.CORRUPT]


@pytest.mark.parametrize("outage", [Code.RPC_FAIL, Code.RPC_TIMEOUT])
def test_a_master_that_does_not_answer_is_asked_once(
    store: MooncakeStore, client: FakeMooncakeClient, master: FakeMooncakeMaster, outage: Code
) -> None:
    put(store, range(2))
    hanging = threading.Event()
    client.hooks["exists"] += [lambda: None, lambda: assert_set(hanging)]
    master.outage = outage
    assert store.exists(KEYS[:2]) == [Status.ERROR] * 2
    wait_until(lambda: client.num_calls["batch_is_exist"] == 2)
    asked = dict(client.num_calls)
    assert store.exists(KEYS[:2]) == put(store, [3, 4]) == get(store, range(2)) == [Status.ERROR] * 2
    assert store.remove(KEYS[:2]) == [Status.ERROR] * 2
    with pytest.raises(EngineError, match="rpc_fail"):
        store.clear()
    assert client.num_calls == asked
    assert store.stats()["unreachable"] == store.stats()["times_lost"] == 1
    assert store.stats()["refused_calls"] == 5
    master.restart()
    hanging.set()
    wait_until(lambda: not store.stats()["unreachable"])
    assert store.exists(KEYS[:2]) == [Status.MISS] * 2
    assert put(store, range(2)) == get(store, range(2)) == [Status.OK] * 2
    assert store.stats()["reconnects"] == 1
    assert not any(thread.name == "dalsegno-mooncake-probe" for thread in threading.enumerate())


def test_a_master_lost_in_the_middle_of_a_call_costs_the_rest_of_it(
    store: MooncakeStore, client: FakeMooncakeClient, master: FakeMooncakeMaster
) -> None:
    keys = [make_key(number) for number in range(600)]
    store.put(keys, [[memoryview(b"payload")]] * 600)
    client.hooks["get"] += [lambda: None, lambda: setattr(master, "outage", Code.RPC_FAIL)]
    targets = [bytearray(7) for _ in keys]
    found = store.get(keys, [[memoryview(target)] for target in targets])
    assert found == [Status.OK] * 128 + [Status.ERROR] * 472
    assert client.num_calls["batch_get_into_multi_buffers"] == 2


def test_closing_ends_the_search_for_a_lost_master(
    store: MooncakeStore, client: FakeMooncakeClient, master: FakeMooncakeMaster
) -> None:
    master.outage = Code.RPC_FAIL
    store.exists(KEYS)
    store.close()
    wait_until(lambda: not any(thread.name == "dalsegno-mooncake-probe" for thread in threading.enumerate()))
    assert client.num_calls["close"] == 1


def test_closing_waits_for_calls_and_later_ones_reach_no_client(
    store: MooncakeStore, client: FakeMooncakeClient
) -> None:
    put(store, range(2))
    inside, leave = threading.Event(), threading.Event()

    def hang() -> None:
        inside.set()
        assert_set(leave)

    client.hooks["get"].append(hang)
    found: list[Status] = []
    reader = threading.Thread(target=lambda: found.extend(get(store, range(2))))
    closer = threading.Thread(target=store.close)
    reader.start()
    assert inside.wait(20)
    closer.start()
    wait_until(lambda: put(store, [5]) == [Status.ERROR])
    assert client.num_calls["close"] == 0
    leave.set()
    reader.join()
    closer.join()
    assert found == [Status.OK] * 2
    assert client.num_calls["close"] == 1
    store.close()
    assert store.exists(KEYS[:2]) == get(store, range(2)) == store.remove(KEYS[:2]) == [Status.ERROR] * 2
    assert client.num_calls["close"] == 1


def test_a_client_that_hangs_is_left_alone(master: FakeMooncakeMaster) -> None:
    client = FakeMooncakeClient(master, ROOM_BYTES)
    store = MooncakeStore(client, close_timeout_s=0.05)
    inside, leave = threading.Event(), threading.Event()

    def hang() -> None:
        inside.set()
        assert_set(leave)

    client.hooks["exists"].append(hang)
    thread = threading.Thread(target=store.exists, args=(KEYS,))
    thread.start()
    assert inside.wait(20)
    store.close()
    assert client.num_calls["close"] == 0
    leave.set()
    thread.join()
    assert client.num_calls["close"] == 0


def test_many_threads_and_a_close_never_call_a_closed_client(master: FakeMooncakeMaster) -> None:
    client = FakeMooncakeClient(master, ROOM_BYTES, must_register=True)
    store = make_store(client)
    rounds: list[int] = []

    def use() -> None:
        while put(store) != [Status.ERROR] * 8:
            get(store)
            store.exists(KEYS)
            rounds.append(1)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(rounds) > 20)
    store.close()
    for thread in threads:
        thread.join()
    assert client.used_after_close == []
    assert client.num_calls["close"] == 1
