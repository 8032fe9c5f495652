"""Processes that die, and processes that share a store."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from dalsegno.store.base import Status
from dalsegno.store.embedded import EmbeddedStore
from dalsegno.store.embedded.inspection import verify_store
from tests.repo.source import ROOT
from tests.store.objects import put_number, size_of, verified

MANY = 10**6


def start_writer(path: Path, num_bytes: int, first: int, count: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.store.writer", str(path), str(num_bytes), str(first), str(count)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def reported(text: str) -> list[int]:
    """Numbers in whole lines: the last line of a killed process may be cut."""
    return [int(line) for line in text.splitlines(keepends=True) if line.endswith("\n") and line[0].isdigit()]


def kill_later(writer: "subprocess.Popen[str]", seconds: float) -> list[int]:
    assert writer.stdout is not None
    assert writer.stdout.readline() == "open\n"
    time.sleep(seconds)
    writer.send_signal(signal.SIGKILL)
    output, _ = writer.communicate()
    return reported(output)


def test_a_killed_writer_loses_nothing_that_was_reported(tmp_path: Path, long: bool) -> None:
    rng = random.Random(0)
    stored: set[int] = set()
    for round_number in range(50 if long else 5):
        first = round_number * MANY
        done = kill_later(start_writer(tmp_path / "store", 2**28, first, MANY), rng.uniform(0.0, 0.4))
        store = EmbeddedStore(tmp_path / "store")
        assert set(verified(store, done[-20:]).values()) <= {Status.OK}
        assert Status.MISS not in verified(store, done).values() or store.stats()["evicted_objects"]
        stored |= set(done[-20:])
        assert set(verified(store, stored).values()) <= {Status.OK, Status.MISS}
        assert store.stats()["moved_aside"] == 0
        assert verify_store(store) == []
        store.close()
    assert stored


def test_a_killed_writer_of_a_full_store_leaves_it_sound(tmp_path: Path, long: bool) -> None:
    rng = random.Random(1)
    for round_number in range(20 if long else 3):
        done = kill_later(start_writer(tmp_path / "store", 2**22, round_number * MANY, MANY), rng.uniform(0.1, 0.6))
        store = EmbeddedStore(tmp_path / "store")
        found = verified(store, done)
        assert set(found.values()) <= {Status.OK, Status.MISS}
        assert all(found[number] is Status.OK for number in done[-3:])
        assert store.stats()["used_bytes"] <= 2**22
        assert verify_store(store) == []
        store.close()


def test_two_processes_write_and_read_one_store_at_once(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = EmbeddedStore(path, 2**27)
    writers = [start_writer(path, 2**27, first, 300) for first in (0, 150)]
    seen = 0
    while any(writer.poll() is None for writer in writers):
        found = verified(store, random.sample(range(450), 20))
        assert set(found.values()) <= {Status.OK, Status.MISS}
        seen += list(found.values()).count(Status.OK)
        assert put_number(store, 1000 + seen % 50) in (Status.OK, Status.EXISTS)
    assert [writer.returncode for writer in writers] == [0, 0]
    reports = [reported(writer.communicate()[0]) for writer in writers]
    assert reports == [list(range(300)), list(range(150, 450))]
    assert set(verified(store, range(450)).values()) == {Status.OK}
    assert verify_store(store) == []
    assert store.stats()["evicted_objects"] == 0
    store.close()


def test_processes_that_fill_a_small_store_keep_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = EmbeddedStore(path, 2**22, sync_interval_s=0.05)
    writers = [start_writer(path, 2**22, first, 150) for first in (0, 1000)]
    while any(writer.poll() is None for writer in writers):
        assert set(verified(store, range(150)).values()) <= {Status.OK, Status.MISS}
        assert store.stats()["used_bytes"] <= 2**22
    assert [writer.returncode for writer in writers] == [0, 0]
    assert store.stats()["evicted_objects"] > 0
    assert verify_store(store) == []
    assert sum(map(size_of, range(150))) > 2**22
    store.close()
    for writer in writers:
        writer.communicate()
