"""The Mooncake store beside Mooncake's own calls: objects with headers and checksums, through a master on this host.

Another process lends the memory, so that bytes cross the loopback as they would a network. Reference of each figure is
one raw call per batch on the same registered memory and, in series with it, the checksum of the same bytes. Both take
turns, on fresh keys; what was put is removed between the rounds. Ratios are those of a round, the median of them.
"""

import itertools
import mmap
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
from lender import lender
from rows import Row, command_line, parse_arguments, print_rows

from dalsegno.store.base import Status
from dalsegno.store.keys import StoreKey, namespace_digest, salt_tag
from dalsegno.store.mooncake import MooncakeStore
from dalsegno.store.mooncake.client import MooncakeClient, connect
from dalsegno.store.mooncake.config import MooncakeConfig
from dalsegno.store.objects import StoreObject, get_objects, payload_checksum, put_objects
from dalsegno.types import BlockHash

_BATCH = 8
_NAMESPACE = namespace_digest({"benchmark": "mooncake"})
_SALT = salt_tag(None)
_numbers = itertools.count()


class Memory:
    """Objects of equal size in one region, each cut into parts, as a put takes them and a get fills them."""

    def __init__(self, num_objects: int, num_bytes: int, num_parts: int) -> None:
        self.region = memoryview(mmap.mmap(-1, num_objects * num_bytes))
        self.array = np.frombuffer(self.region, np.uint8)
        self.array[:] = np.random.default_rng(0).integers(0, 256, len(self.array), np.uint8)
        start: int = self.array.__array_interface__["data"][0]
        size = num_bytes // num_parts
        self.objects = [
            [self.region[at : at + size] for at in range(first, first + num_bytes, size)]
            for first in range(0, num_objects * num_bytes, num_bytes)
        ]
        self.addresses = [
            [start + at for at in range(first, first + num_bytes, size)]
            for first in range(0, num_objects * num_bytes, num_bytes)
        ]
        self.sizes = [[size] * num_parts] * num_objects


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _check(found: bool) -> None:
    if not found:
        raise SystemExit("Mooncake has refused something: is there room?")


def _round(client: MooncakeClient, store: MooncakeStore, source: Memory, target: Memory) -> Iterator[tuple[str, float]]:
    """Put and get everything once raw, once through the store."""
    batches = [range(first, first + _BATCH) for first in range(0, len(source.objects), _BATCH)]
    keys = [
        StoreKey(_NAMESPACE, _SALT, "attention", 256, BlockHash(next(_numbers).to_bytes(32, "big")))
        for _ in source.objects
    ]
    names = [f"raw:{next(_numbers)}" for _ in source.objects]

    def raw_put() -> None:
        for batch in batches:
            codes = client.batch_put_from_multi_buffers(
                [names[i] for i in batch], [source.addresses[i] for i in batch], [source.sizes[i] for i in batch]
            )
            _check(set(codes) == {0})

    def raw_get() -> None:
        for batch in batches:
            codes = client.batch_get_into_multi_buffers(
                [names[i] for i in batch], [target.addresses[i] for i in batch], [target.sizes[i] for i in batch]
            )
            _check(min(codes) > 0)

    def checksums(memory: Memory) -> None:
        for parts in memory.objects:
            payload_checksum(parts)

    def through(call: Callable[[MooncakeStore, list[StoreObject]], list[Status]], memory: Memory) -> None:
        for batch in batches:
            statuses = call(store, [StoreObject(keys[i], 256, memory.objects[i]) for i in batch])
            _check(set(statuses) == {Status.OK})

    yield "raw put", _seconds(raw_put)
    yield "checksum before a put", _seconds(lambda: checksums(source))
    yield "put", _seconds(lambda: through(put_objects, source))
    target.array[:] = 0
    yield "raw get", _seconds(raw_get)
    yield "checksum behind a get", _seconds(lambda: checksums(target))
    target.array[:] = 0
    yield "get", _seconds(lambda: through(get_objects, target))
    _check(bool((target.array == source.array).all()))
    client.batch_remove(names, True)
    store.clear(_NAMESPACE)


def main() -> None:
    """Measure and print the rows."""
    arguments = parse_arguments(__doc__ or "", ("objects", 64), ("kib", 2048), ("parts", 16), ("rounds", 9))
    source = Memory(arguments.objects, arguments.kib * 1024, arguments.parts)
    target = Memory(arguments.objects, arguments.kib * 1024, arguments.parts)
    total = source.region.nbytes
    found: dict[str, list[float]] = {}
    with lender(max(4 * total, 2**26)) as address:
        client = connect(MooncakeConfig(address))
        store = MooncakeStore(client)
        store.register(source.region)
        store.register(target.region)
        for _ in range(1 + arguments.rounds):
            for name, seconds in _round(client, store, source, target):
                found.setdefault(name, []).append(seconds)
        store.close()
    rows = []
    for call, checksum in (("put", "checksum before a put"), ("get", "checksum behind a get")):
        series = [raw + summed for raw, summed in zip(found[f"raw {call}"], found[checksum], strict=True)][1:]
        for name in (f"raw {call}", checksum, call):
            seconds = found[name][1:]
            ratio = statistics.median(both / own for both, own in zip(series, seconds, strict=True))
            speed, beside = (total / statistics.median(times) / 1e9 for times in (seconds, series))
            rows.append(Row(f"Mooncake: {name}", speed, "GB/s", beside, ratio, command_line()))
    print_rows(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
