"""The embedded store: bound and eviction against a naive oracle, reopening, damage, power cuts, full disks."""

import contextlib
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dalsegno.errors import EngineError, OptionError
from dalsegno.store.base import Status
from dalsegno.store.embedded import EmbeddedStore, folder
from dalsegno.store.embedded.inspection import list_store, verify_store
from dalsegno.store.keys import StoreKey
from dalsegno.testing.store_contract import make_key, pattern
from tests.small_disk import fill
from tests.store.objects import put_number, verified

MIB = 2**20


def count_against_bound(num_bytes: int) -> int:
    """docs/store-format.md: pieces of 262,128 bytes in 64 pages, the rest in whole pages, 512 bytes for the tables."""
    charge = 512
    while num_bytes > 0:
        piece = min(num_bytes, 262_128)
        charge += (piece + 16 + 4095) // 4096 * 4096
        num_bytes -= piece
    return charge


class NaiveStore:
    """A list of objects, oldest first, and nothing clever."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.objects: dict[StoreKey, tuple[int, int]] = {}  # tick, bytes
        self.tick = 0

    def used(self) -> int:
        return sum(count_against_bound(size) for _, size in self.objects.values())

    def put(self, keys: list[StoreKey], sizes: list[int]) -> list[Status]:
        self.tick += 1
        statuses = []
        for key, size in zip(keys, sizes, strict=True):
            if key in self.objects:
                statuses.append(Status.EXISTS)
                continue
            kept = sum(count_against_bound(s) for tick, s in self.objects.values() if tick == self.tick)
            if kept + count_against_bound(size) > self.bound:
                statuses.append(Status.NO_ROOM)
                continue
            while self.used() + count_against_bound(size) > self.bound:
                _, first = min((tick, -k.boundary) for k, (tick, _) in self.objects.items())
                oldest = min(tick for tick, _ in self.objects.values())
                for k in [k for k, (tick, _) in self.objects.items() if (tick, -k.boundary) == (oldest, first)]:
                    del self.objects[k]
            self.objects[key] = (self.tick, size)
            statuses.append(Status.OK)
        return statuses

    def touch(self, keys: list[StoreKey]) -> None:
        self.tick += 1
        for key in keys:
            if key in self.objects:
                self.objects[key] = (self.tick, self.objects[key][1])


KEYS = [make_key(n, boundary=16 * (n % 4), part=part) for n in range(6) for part in ("attention", "state")]
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)
sizes = st.sampled_from([1, 4080, 4081, 100_000, 262_128, 262_129, 400_000, 1_500_000])


class EmbeddedMachine(RuleBasedStateMachine):
    """Every call on both; what is there and who goes first must agree."""

    @initialize()
    def start(self) -> None:
        self.path = Path(os.environ.get("TMPDIR", "/" + "tmp")) / f"dalsegno-machine-{os.getpid()}"
        shutil.rmtree(self.path, ignore_errors=True)
        self.store = EmbeddedStore(self.path, MIB)
        self.naive = NaiveStore(MIB)

    @rule(key=st.sampled_from(KEYS), size=sizes)
    def put(self, key: StoreKey, size: int) -> None:
        statuses = self.store.put([key], [[memoryview(pattern(size, size))]])
        assert statuses == self.naive.put([key], [size])

    @rule(keys=some_keys, size=st.sampled_from([1, 50_000, 262_129]))
    def put_many(self, keys: list[StoreKey], size: int) -> None:
        # The store makes room for the whole call at once; that is the same as one by one while no key of the call is
        # there, to be evicted for another one.
        if any(key in self.naive.objects for key in keys):
            return
        payload = [memoryview(pattern(size, size))]
        assert self.store.put(keys, [payload] * len(keys)) == self.naive.put(keys, [size] * len(keys))

    @rule(key=st.sampled_from(KEYS))
    def get(self, key: StoreKey) -> None:
        _, size = self.naive.objects.get(key, (0, 10))
        target = bytearray(size)
        [status] = self.store.get([key], [[memoryview(target)]])
        assert status is (Status.OK if key in self.naive.objects else Status.MISS)
        assert status is Status.MISS or target == pattern(size, size)

    @rule(keys=some_keys)
    def touch(self, keys: list[StoreKey]) -> None:
        self.store.touch(keys)
        self.naive.touch(keys)

    @rule(keys=some_keys)
    def remove(self, keys: list[StoreKey]) -> None:
        present = [Status.OK if key in self.naive.objects else Status.MISS for key in keys]
        assert self.store.remove(keys) == present
        for key in keys:
            self.naive.objects.pop(key, None)

    @rule()
    def open_again(self) -> None:
        self.store.close()
        self.store = EmbeddedStore(self.path, create=False)

    @invariant()
    def the_same_objects_are_there(self) -> None:
        found = self.store.exists(KEYS)
        assert found == [Status.OK if key in self.naive.objects else Status.MISS for key in KEYS]
        assert self.store.stats()["used_bytes"] == self.naive.used()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            assert verify_store(self.store) == []
            self.store.close()
            shutil.rmtree(self.path)


TestEmbeddedMachine = EmbeddedMachine.TestCase


def numbers_there(store: EmbeddedStore, numbers: range) -> list[int]:
    return [number for number, status in verified(store, numbers).items() if status is Status.OK]


@contextlib.contextmanager
def open_store(path: Path, num_bytes: int | None = 16 * MIB, interval: float = 3600.0) -> Iterator[EmbeddedStore]:
    store = EmbeddedStore(path, num_bytes, sync_interval_s=interval)
    yield store
    store.close()


def test_the_folder_is_private_and_keeps_its_objects(tmp_path: Path) -> None:
    path = tmp_path / "new" / "store"
    with open_store(path) as store:
        assert put_number(store, 1) is Status.OK
    assert path.stat().st_mode & 0o777 == 0o700
    assert (path / "objects.lmdb").stat().st_mode & 0o777 == 0o600
    with open_store(path, None) as store:
        assert numbers_there(store, range(3)) == [1]
        assert store.stats()["capacity_bytes"] == 16 * MIB


def test_two_stores_of_one_process_share_the_file(tmp_path: Path) -> None:
    with open_store(tmp_path) as one:
        with open_store(tmp_path / "." / "") as other:
            assert put_number(one, 1) is Status.OK
            assert numbers_there(other, range(3)) == [1]
        assert put_number(one, 2) is Status.OK


def test_the_bound_can_be_changed_when_nobody_else_has_it_open(tmp_path: Path) -> None:
    for bound in (8, 32, 4):
        with open_store(tmp_path, bound * MIB) as store:
            for number in range(150):
                assert put_number(store, bound * 1000 + number) is Status.OK
            assert 0.8 * bound * MIB < store.stats()["used_bytes"] <= bound * MIB
            assert verify_store(store) == []


def test_a_state_and_its_attention_leave_together(tmp_path: Path) -> None:
    with open_store(tmp_path, MIB) as store:
        families = [[make_key(n, boundary=b, part=part) for b in (16, 32) for part in "as"] for n in range(8)]
        payload = [memoryview(bytes(100_000))]
        for family in families:
            for key in family:
                assert store.put([key], [payload]) == [Status.OK]
            store.touch(family)
        for family in families:
            pairs = [store.exists(family[start : start + 2]) for start in (0, 2)]
            assert all(len(set(pair)) == 1 for pair in pairs)
        assert [set(store.exists(family)) for family in families[-2:]] == [{Status.OK}] * 2
        assert set(store.exists(families[0])) == {Status.MISS}


@pytest.mark.parametrize("name", ["text", "cut", "garbage", "format", "no_format_fields"])
def test_a_damaged_store_is_moved_aside_and_a_new_one_started(tmp_path: Path, name: str) -> None:
    with open_store(tmp_path) as store:
        assert put_number(store, 1) is Status.OK
    file = tmp_path / "objects.lmdb"
    if name == "text":
        file.write_text("nothing")
    elif name == "cut":
        os.truncate(file, 20_000)
    elif name == "garbage":
        with file.open("r+b") as opened:
            opened.write(random.Random(0).randbytes(2**16))
    else:
        (tmp_path / "format.json").write_text('{"format": 99, "reserved_bytes": 0}' if name == "format" else "[]")
    for _ in range(2):
        with open_store(tmp_path) as store:
            assert numbers_there(store, range(3)) == []
            assert store.stats()["moved_aside"] == 1
            assert put_number(store, 2) is Status.OK
            assert store.remove([make_key(2)]) == [Status.OK]
            assert verify_store(store) == []
    assert (tmp_path / "aside" / "objects.lmdb").exists()


def test_a_changed_payload_is_corrupt_and_found_by_verify(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        assert put_number(store, 5) is Status.OK
        [entry] = list_store(store)
    content = (tmp_path / "objects.lmdb").read_bytes()
    word = (5).to_bytes(8, "little") * 100
    assert content.count(word) > 0
    (tmp_path / "objects.lmdb").write_bytes(content.replace(word, bytes(800), 1))
    with open_store(tmp_path) as store:
        assert verified(store, [5]) == {5: Status.CORRUPT}
        assert verify_store(store) == [f"{entry.key.text}: the checksum is wrong"]


def test_other_folders_are_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(OptionError, match=r"neither a store nor empty: it holds 'letter\.txt'"):
        EmbeddedStore(tmp_path)
    with pytest.raises(OptionError, match="no store"):
        EmbeddedStore(tmp_path, create=False)
    with pytest.raises(OptionError, match="No such file"):
        EmbeddedStore(tmp_path / "gone", create=False)
    with pytest.raises(OptionError, match="Not a directory"):
        EmbeddedStore(tmp_path / "letter.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_a_power_cut_costs_what_was_not_synced_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    """Pages written since the last sync reach the disk or not, each by chance, meta pages included."""
    for round_number in range(40 if long else 6):
        rng = random.Random(round_number)
        path, cut = tmp_path / f"{round_number}", tmp_path / f"{round_number}-cut"
        with open_store(path, 4 * MIB) as store:
            for number in range(60):  # more than fits, so that old pages are wanted
                assert put_number(store, number) is Status.OK
            assert store.environment is not None
            store.environment.sync()
            synced, syncs = numbers_there(store, range(60)), store.stats()["syncs"]
            before = (path / "objects.lmdb").read_bytes()
            for number in range(60, 60 + rng.randrange(1, 20)):
                assert put_number(store, number) is Status.OK
            after = (path / "objects.lmdb").read_bytes()
            assert store.stats()["syncs"] == syncs, "a forced sync would make this test idle"
            shutil.copytree(path, cut, ignore=shutil.ignore_patterns("objects.lmdb-lock"))
        pages = [rng.choice((before, after))[start : start + 4096] for start in range(0, len(after), 4096)]
        (cut / "objects.lmdb").write_bytes(b"".join(pages))
        monkeypatch.setattr(folder, "boot_id", lambda: "another start")
        with open_store(cut, None) as store:
            assert store.stats()["moved_aside"] == 0
            assert verify_store(store) == []
            assert numbers_there(store, range(60)) == synced
            assert put_number(store, 1000) is Status.OK
        monkeypatch.undo()


def test_a_disk_that_fills_up_under_load_does_not_touch_the_store(small_disk: Path) -> None:
    with open_store(small_disk / "store", 8 * MIB, interval=0.05) as store:
        for number in range(50):
            assert put_number(store, number) is Status.OK
        fill(small_disk)
        for number in range(50, 300):
            assert put_number(store, number) is Status.OK
            assert verified(store, [number]) == {number: Status.OK}
        assert verify_store(store) == []
        assert store.stats()["evicted_objects"] > 0
    with open_store(small_disk / "store") as store:
        assert numbers_there(store, range(299, 300)) == [299]


def test_a_store_on_a_disk_too_small_for_it_takes_what_there_is(small_disk: Path) -> None:
    with open_store(small_disk / "store", 64 * MIB) as store:
        assert store.stats()["capacity_bytes"] == 8 * MIB
        for number in range(100):
            assert put_number(store, number) is Status.OK
        assert verify_store(store) == []


def test_a_full_disk_is_no_room_until_there_is_some(small_disk: Path) -> None:
    fill(small_disk)
    with open_store(small_disk / "store", 8 * MIB) as store:
        assert put_number(store, 1) is Status.NO_ROOM
        assert verified(store, [1]) == {1: Status.MISS}
        assert store.exists([make_key(1)]) == [Status.MISS]
        assert store.clear() == 0
        assert store.stats()["no_room"] == 1
        (small_disk / "ballast").unlink()
        assert put_number(store, 1) is Status.OK
        assert verified(store, [1]) == {1: Status.OK}


def test_a_clearing_that_fails_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[bytes]:
        raise OSError("the disk is gone")

    with open_store(tmp_path / "store") as store:
        assert put_number(store, 1) is Status.OK
        with monkeypatch.context() as patched:
            patched.setattr(store, "_drop", fail)
            with pytest.raises(EngineError, match="the disk is gone"):
                store.clear()
        assert store.clear() == 1


@pytest.mark.parametrize("seed", [2, 5, 13, 23, 28, *range(100, 105)])
def test_objects_are_removed_from_a_file_full_of_pages_that_cannot_be_reused_yet(seed: int, tmp_path: Path) -> None:
    """As for a put, the store is synced then; nobody else does that in this test."""
    rng = random.Random(seed)
    bound = rng.choice([2**20, 2**22, 2**24])
    store = EmbeddedStore(tmp_path, bound, sync_interval_s=1000)
    for number in range(200):
        chance = rng.random()
        size = rng.choice([bound // 40, bound // 30, bound // 20, 100])
        if chance < 0.8:
            store.put([make_key(number)], [[memoryview(bytes(size))]])
        elif chance < 0.9:
            store.clear()
            assert store.stats()["objects"] == 0
        else:
            assert Status.ERROR not in store.remove([make_key(k) for k in range(max(0, number - 9), number)])
    store.close()
