"""The embedded store as it ships, one thread, checksums on, beside a copy into warm memory.

Figures are bytes per second, and each ratio is to that copy. A round puts objects of new keys, batch by batch, and
reads them; behind it, untimed, they are removed and the file is synced, as the store does by itself every few seconds,
for freed pages are used again only after that. The first put touches pages of the file that the system has to find
first; that is a row of its own, for raw LMDB too.
"""

import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import xxhash
from rows import Row, command_line, parse_arguments, print_rows

from dalsegno.store.base import Status
from dalsegno.store.embedded import EmbeddedStore
from dalsegno.store.embedded.records import charge_of
from dalsegno.store.keys import StoreKey, namespace_digest, salt_tag
from dalsegno.store.objects import HEADER_BYTES, StoreObject, get_objects, put_objects
from dalsegno.types import BlockHash

_BATCH = 4
_NAMESPACE = namespace_digest({"benchmark": "store"})
_SALT = salt_tag(None)


def _key(number: int) -> StoreKey:
    return StoreKey(_NAMESPACE, _SALT, "attention", 256, BlockHash(number.to_bytes(32, "big")))


def _objects(start: int, memory: list[memoryview]) -> list[StoreObject]:
    return [StoreObject(_key(start + index), 256, [part]) for index, part in enumerate(memory)]


def _batches(objects: list[StoreObject]) -> list[list[StoreObject]]:
    return [objects[start : start + _BATCH] for start in range(0, len(objects), _BATCH)]


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _memory(num_objects: int, num_bytes: int, *, random_bytes: bool) -> list[memoryview]:
    rng = np.random.default_rng(0)
    shape = num_objects * num_bytes
    array = rng.integers(0, 256, shape, np.uint8) if random_bytes else np.ones(shape, np.uint8)
    view = memoryview(array).cast("B")
    return [view[start : start + num_bytes] for start in range(0, shape, num_bytes)]


def _raw_lmdb(folder: Path, source: list[memoryview], target: list[memoryview], rounds: int) -> dict[str, list[float]]:
    """Seconds of plain puts and gets of whole values, with the store's own flags and map."""
    size = 3 * sum(part.nbytes for part in source)
    lmdb.open(str(folder / "raw"), subdir=False, map_size=2**16).close()
    with (folder / "raw").open("r+b") as file:
        file.truncate(size)
    env = lmdb.open(
        str(folder / "raw"), subdir=False, map_size=size, writemap=True, meminit=False, sync=False, metasync=False
    )
    found: dict[str, list[float]] = {"put": [], "get": []}

    def put(start: int) -> None:
        for first in range(0, len(source), _BATCH):
            with env.begin(write=True) as txn:
                for index in range(first, first + _BATCH):
                    txn.put((start + index).to_bytes(32, "big"), source[index])

    def get(start: int) -> None:
        for first in range(0, len(source), _BATCH):
            with env.begin(buffers=True) as txn:
                for index in range(first, first + _BATCH):
                    target[index][:] = txn.get((start + index).to_bytes(32, "big")) or b""

    for number in range(rounds):
        start = number * len(source)
        found["put"].append(_seconds(lambda: put(start)))  # noqa: B023
        found["get"].append(_seconds(lambda: get(start)))  # noqa: B023
        with env.begin(write=True) as txn:
            for index in range(start, start + len(source)):
                txn.delete(index.to_bytes(32, "big"))
        env.sync(True)
    env.close()
    return found


def _store(folder: Path, source: list[memoryview], target: list[memoryview], rounds: int) -> dict[str, list[float]]:
    """Seconds of puts and gets with headers and checksums, and of `exists` over all keys of a round."""
    store = EmbeddedStore(folder / "store", sum(charge_of(part.nbytes + HEADER_BYTES) for part in source))
    found: dict[str, list[float]] = {"put": [], "get": [], "exists": []}

    def run(call: Callable[[EmbeddedStore, list[StoreObject]], list[Status]], objects: list[StoreObject]) -> None:
        for batch in _batches(objects):
            statuses = call(store, batch)
            if statuses != [Status.OK] * len(batch):
                raise SystemExit(f"the store answered {statuses}")

    for number in range(rounds):
        stored, wanted = _objects(number * len(source), source), _objects(number * len(source), target)
        found["put"].append(_seconds(lambda: run(put_objects, stored)))  # noqa: B023
        found["get"].append(_seconds(lambda: run(get_objects, wanted)))  # noqa: B023
        keys = [item.key for item in wanted]
        random.Random(number).shuffle(keys)
        found["exists"].append(_seconds(lambda: store.exists(keys) and None))  # type: ignore[func-returns-value] # noqa: B023
        store.clear()
        if store.environment is not None:
            store.environment.sync()
    store.close()
    return found


def main() -> None:
    """Measure and print the rows."""
    options = (("objects", 256), ("kib", 2048), ("rounds", 7))
    arguments = parse_arguments(__doc__ or "", *options)
    source = _memory(arguments.objects, arguments.kib * 1024, random_bytes=True)
    target = _memory(arguments.objects, arguments.kib * 1024, random_bytes=False)
    total = arguments.objects * arguments.kib * 1024

    def copy() -> None:
        for part, place in zip(source, target, strict=True):
            place[:] = part

    def checksum() -> None:
        for part in source:
            xxhash.xxh3_128(part).digest()

    folder = Path(tempfile.mkdtemp(prefix="dalsegno-store-", dir="."))
    try:
        copies = [_seconds(copy) for _ in range(arguments.rounds)]
        sums = [_seconds(checksum) for _ in range(arguments.rounds)]
        raw = _raw_lmdb(folder, source, target, arguments.rounds)
        store = _store(folder, source, target, arguments.rounds)
        copies += [_seconds(copy) for _ in range(arguments.rounds)]
    finally:
        shutil.rmtree(folder)
    speed = total / statistics.median(copies) / 1e9
    figures = {
        "copy into warm memory": statistics.median(copies),
        "checksum": statistics.median(sums),
        "raw LMDB: put, first round": raw["put"][0],
        "raw LMDB: put": statistics.median(raw["put"][1:]),
        "raw LMDB: get": statistics.median(raw["get"]),
        "store: put, first round": store["put"][0],
        "store: put": statistics.median(store["put"][1:]),
        "store: get": statistics.median(store["get"]),
    }
    rows = [
        Row(name, total / seconds / 1e9, "GB/s", speed, total / seconds / 1e9 / speed, command_line())
        for name, seconds in figures.items()
    ]
    exists = statistics.median(store["exists"]) / arguments.objects * 1e6
    rows.append(Row("store: exists, per key", exists, "us", 10.0, exists / 10, command_line()))
    print_rows(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
