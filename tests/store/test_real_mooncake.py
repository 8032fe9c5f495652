"""The Mooncake store on the real package and a real master."""

import ctypes
import mmap
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from dalsegno.errors import OptionError
from dalsegno.store.base import Status
from dalsegno.store.mooncake import MooncakeStore, open_mooncake
from dalsegno.store.mooncake.client import MooncakeClient, connect
from dalsegno.store.mooncake.config import MIN_SEGMENT_BYTES, MooncakeConfig
from dalsegno.store.mooncake.master import MooncakeMaster, free_port
from dalsegno.testing.store_contract import StoreContract, make_key, pattern

KEYS = [make_key(number) for number in range(20)]


class KeptClient:
    """A client that outlives the stores on it: closing a real one takes seconds."""

    def __init__(self, client: MooncakeClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> object:
        return getattr(self._client, name)

    def close(self) -> int:
        return 0


@pytest.fixture(scope="module")
def kept_client(mooncake_package: None) -> Iterator[MooncakeClient]:
    """A client that lends 64 MiB to a master of its own."""
    with MooncakeMaster(lease_s=1.0) as master:
        client = connect(MooncakeConfig(master_server_address=master.address, global_segment_size=2**26))
        kept: object = KeptClient(client)
        yield kept  # type: ignore[misc]  # has all methods by delegation
        client.close()


class TestRealMooncake(StoreContract):
    tells_existing = False

    @pytest.fixture
    def store(self, kept_client: MooncakeClient) -> Iterator[MooncakeStore]:
        store = MooncakeStore(kept_client)
        yield store
        store.close()
        MooncakeStore(kept_client).clear()


def open_at(master: MooncakeMaster, lent_bytes: int = MIN_SEGMENT_BYTES) -> MooncakeStore:
    return open_mooncake({"master_server_address": master.address, "global_segment_size": lent_bytes})


def put(store: MooncakeStore, size: int = 1000, numbers: range = range(8)) -> list[Status]:
    payloads = [pattern(number, size) for number in numbers]
    return store.put([KEYS[n] for n in numbers], [[memoryview(payload)] for payload in payloads])


def get(store: MooncakeStore, size: int = 1000, numbers: range = range(8)) -> list[Status]:
    """Read objects; those that are OK hold their bytes, or this raises."""
    targets = [bytearray(size) for _ in numbers]
    statuses = store.get([KEYS[n] for n in numbers], [[memoryview(target)] for target in targets])
    for number, target, status in zip(numbers, targets, statuses, strict=True):
        assert status is not Status.OK or target == pattern(number, size)
    return statuses


def wait_until(condition: Callable[[], object], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "this should have happened"
        time.sleep(0.05)


def test_announced_memory_is_read_and_written_where_it_is(kept_client: MooncakeClient) -> None:
    store = MooncakeStore(kept_client)
    memory = memoryview(mmap.mmap(-1, 2**22))
    store.register(memory)
    store.register(memory)
    half = 2**21
    memory[:half] = pattern(1, half)
    assert store.put(KEYS[:1], [[memory[5:1_000_000], memory[1_000_000:half]]]) == [Status.OK]
    assert store.get(KEYS[:1], [[memory[half : half + 777_777], memory[half + 777_777 : 2 * half - 5]]]) == [Status.OK]
    assert memory[half : 2 * half - 5] == memory[5:half]
    assert store.stats()["registered_bytes"] == 2**22
    store.clear()
    store.close()


def test_objects_of_many_small_pieces_are_within_what_the_client_can_do(kept_client: MooncakeClient) -> None:
    store = MooncakeStore(kept_client)
    memory = memoryview(mmap.mmap(-1, 2**22))
    store.register(memory)
    half, unit = 2**21, 512
    memory[:half] = pattern(2, half)
    objects = [[memory[at : at + unit] for at in range(start, half, 8 * unit)] for start in range(0, 8 * unit, unit)]
    places = [
        [memory[half:][at : at + unit] for at in range(start, half, 8 * unit)] for start in range(0, 8 * unit, unit)
    ]
    assert sum(map(len, objects)) > 4000
    assert store.put(KEYS[:8], objects) == store.get(KEYS[:8], places) == [Status.OK] * 8
    assert memory[half:] == memory[:half]
    store.clear()
    store.close()


def test_two_stores_share_their_objects_and_others_keep_theirs(kept_client: MooncakeClient) -> None:
    one, two = MooncakeStore(kept_client), MooncakeStore(kept_client)
    assert put(one) == put(two) == get(two) == [Status.OK] * 8
    foreign, memory = "vllm@" + KEYS[0].text, ctypes.create_string_buffer(64)
    assert kept_client.batch_put_from_multi_buffers([foreign], [[ctypes.addressof(memory)]], [[64]]) == [0]
    assert one.clear() == 8
    assert get(two) == [Status.MISS] * 8
    assert kept_client.get_size(foreign) == 64
    assert kept_client.batch_remove([foreign], True) == [0]
    one.close()
    two.close()


def test_a_read_that_outlives_its_lease_is_thrown_away(mooncake_package: None) -> None:
    with MooncakeMaster(lease_s=0.001) as master:
        store = open_at(master, 2**26)
        size = 2**25
        payload, target = bytearray(size), bytearray(size)
        assert store.put(KEYS[:1], [[memoryview(payload)]]) == [Status.OK]
        assert store.get(KEYS[:1], [[memoryview(target)]]) == [Status.ERROR]
        assert store.stats()["lease_expired"] == 1
        store.close()


def test_a_killed_master_costs_its_objects_and_its_successor_takes_new_ones(mooncake_master: MooncakeMaster) -> None:
    store = open_at(mooncake_master)
    assert put(store) == get(store) == [Status.OK] * 8
    mooncake_master.stop(kill=True)
    assert store.exists(KEYS[:2]) == [Status.ERROR] * 2
    start = time.monotonic()
    assert get(store) == put(store) == [Status.ERROR] * 8
    assert time.monotonic() - start < 0.5, "only the first call waits for the master"
    assert store.stats()["unreachable"] == 1
    mooncake_master.start()
    wait_until(lambda: not store.stats()["unreachable"])
    assert get(store) == [Status.MISS] * 8
    wait_until(lambda: put(store) == [Status.OK] * 8)
    assert get(store) == [Status.OK] * 8
    assert store.stats()["reconnects"] == 1
    store.close()


def test_a_frozen_master_is_waited_for_once(mooncake_master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "500")
    store = open_at(mooncake_master)
    assert put(store) == [Status.OK] * 8
    assert mooncake_master.process is not None
    process = psutil.Process(mooncake_master.process.pid)
    process.suspend()
    try:
        threads = list(Path(f"/proc/{process.pid}/task").glob("*/stat"))
        wait_until(lambda: all(") T " in thread.read_text() for thread in threads))
        assert get(store) == [Status.ERROR] * 8
        start = time.monotonic()
        assert get(store) == put(store) == [Status.ERROR] * 8
        assert time.monotonic() - start < 0.3
        assert store.stats()["get_rpc_timeout"] == 8
    finally:
        process.resume()
    wait_until(lambda: not store.stats()["unreachable"])
    assert get(store) == [Status.OK] * 8, "a master that was frozen has forgotten nothing"
    store.close()


def test_a_segment_that_is_too_small_refuses_the_rest_and_eviction_makes_room(mooncake_master: MooncakeMaster) -> None:
    store = open_at(mooncake_master)
    size = MIN_SEGMENT_BYTES // 8
    found = put(store, size, range(20))
    assert set(found) == {Status.OK, Status.NO_ROOM}
    stored = [number for number, status in enumerate(found) if status is Status.OK]
    # A failed put makes the master evict at once, also what has just been put and nobody has read.
    assert [get(store, size, range(n, n + 1)) for n in stored].count([Status.OK]) > 0
    assert store.stats()["no_room"] == found.count(Status.NO_ROOM)
    missing = next(number for number, status in enumerate(found) if status is Status.NO_ROOM)
    # What was read has a lease; behind that it may go.
    wait_until(lambda: put(store, size, range(missing, missing + 1)) == [Status.OK])
    assert get(store, size, range(missing, missing + 1)) == [Status.OK]
    store.close()


def test_what_a_process_lent_is_gone_with_it(mooncake_master: MooncakeMaster) -> None:
    lender, user = open_at(mooncake_master), open_at(mooncake_master, 0)
    assert put(user) == get(user) == [Status.OK] * 8
    lender.close()
    assert user.exists(KEYS[:8]) == get(user) == [Status.MISS] * 8
    assert put(user) == [Status.NO_ROOM] * 8
    user.close()


def test_a_master_that_is_not_there_is_said_at_once(mooncake_package: None) -> None:
    start = time.monotonic()
    with pytest.raises(OptionError, match="no Mooncake master answers at"):
        open_mooncake({"master_server_address": f"127.0.0.1:{free_port()}"})
    assert time.monotonic() - start < 10


def test_settings_that_the_package_refuses_are_told_with_what_may_be_wrong(mooncake_master: MooncakeMaster) -> None:
    settings = {"master_server_address": mooncake_master.address, "global_segment_size": MIN_SEGMENT_BYTES}
    with pytest.raises(OptionError) as caught:
        open_mooncake({**settings, "metadata_server": f"http://127.0.0.1:{free_port()}/metadata"})
    words = (mooncake_master.address, "local_hostname='127.0.0.1'", "metadata_server='http://", "16,777,216 bytes")
    assert all(word in str(caught.value) for word in words), caught.value
    assert "protocol" not in str(caught.value), "there is nothing to doubt about tcp"


@pytest.mark.parametrize(
    ("greeting", "message"),
    [(None, "no Mooncake master answers at"), (b"", "is no Mooncake master"), (b"HTTP/1.1 400", "is no Mooncake")],
)
def test_who_listens_and_is_no_master_is_told_at_once(
    greeting: bytes | None, message: str, mooncake_package: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package itself would try to reach it for minutes, one that speaks HTTP for ever."""
    if greeting is None:
        monkeypatch.setattr("dalsegno.store.mooncake.client._MASTER_TIMEOUT_S", 0.2)
    start = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        opened = pool.submit(open_mooncake, {"master_server_address": f"127.0.0.1:{listener.getsockname()[1]}"})
        line, _ = listener.accept()
        with line:
            assert line.recv(100)
            if greeting is not None:
                line.sendall(greeting)
                # It may have hung up already.
                with suppress(OSError):
                    line.shutdown(socket.SHUT_WR)
            with pytest.raises(OptionError, match=message):
                opened.result()
    assert time.monotonic() - start < 10


def test_a_frozen_master_keeps_an_engine_from_starting(
    mooncake_master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dalsegno.store.mooncake.client._MASTER_TIMEOUT_S", 0.2)
    assert mooncake_master.process is not None
    frozen = psutil.Process(mooncake_master.process.pid)
    frozen.suspend()
    try:
        with pytest.raises(OptionError, match="no Mooncake master answers at"):
            open_mooncake({"master_server_address": mooncake_master.address})
    finally:
        frozen.resume()


def test_a_port_in_use_is_refused(mooncake_master: MooncakeMaster) -> None:
    with pytest.raises(OptionError, match=f"port {mooncake_master.port} is in use"):
        MooncakeMaster(mooncake_master.port)
