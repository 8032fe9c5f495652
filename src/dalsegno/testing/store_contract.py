"""What every store and every wrapper has to do: a suite to inherit from.

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self, tmp_path): ...

It is for stores with room for at least `ROOM_BYTES`; what happens beyond is a store's own to test.
"""

import hashlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dalsegno.store.base import Buffers, Status, Store
from dalsegno.store.keys import StoreKey, namespace_digest, salt_tag
from dalsegno.store.objects import HEADER_BYTES, StoreObject, get_objects, put_objects
from dalsegno.types import BlockHash

__all__ = ["ROOM_BYTES", "StoreContract", "make_key", "pattern"]

ROOM_BYTES = 2**23
"""Room that the store under test has at least."""

_SIZES = (1, 15, 16, 4095, 4096, 4097, 262_127, 262_128, 262_129, 600_001)


def make_key(
    number: int, *, boundary: int = 16, part: str = "attention", salt: str = "", engine: str = "a"
) -> StoreKey:
    """Return one of many keys; those that differ in an argument differ."""
    block_hash = BlockHash(hashlib.sha256(str(number).encode()).digest())
    return StoreKey(namespace_digest({"engine": engine}), salt_tag(salt or None), part, boundary, block_hash)


def pattern(seed: int, num_bytes: int) -> bytes:
    """Return bytes that differ by seed and position."""
    return hashlib.shake_128(str(seed).encode()).digest(num_bytes)


def _views(*pieces: bytes) -> Buffers:
    return [memoryview(piece) for piece in pieces]


def _put_one(store: Store, key: StoreKey, payload: bytes) -> Status:
    [status] = store.put([key], [_views(payload)])
    return status


def _get_one(store: Store, key: StoreKey, num_bytes: int) -> tuple[Status, bytes]:
    target = bytearray(num_bytes)
    [status] = store.get([key], [[memoryview(target)]])
    return status, bytes(target)


class StoreContract:
    """The suite.

    Attributes:
        tells_existing: whether the store tells an object that was there from one it has stored; one that cannot, since
            it would have to ask somebody else, may answer OK. Nothing is overwritten by either.
    """

    tells_existing = True

    def check_existing(self, status: Status) -> None:
        """Check what a put says of a key that another call has put."""
        assert status is Status.EXISTS or (status is Status.OK and not self.tells_existing)

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        """Give the store under test, empty; override this."""
        raise NotImplementedError

    def test_what_was_put_is_got(self, store: Store) -> None:
        """Bytes come back as they were, for sizes around every limit."""
        keys = [make_key(size) for size in _SIZES]
        payloads = [pattern(size, size) for size in _SIZES]
        assert store.exists(keys) == [Status.MISS] * len(keys)
        assert store.put(keys, [_views(payload) for payload in payloads]) == [Status.OK] * len(keys)
        assert store.exists(keys) == [Status.OK] * len(keys)
        targets = [bytearray(size) for size in _SIZES]
        assert store.get(keys, [[memoryview(target)] for target in targets]) == [Status.OK] * len(keys)
        assert [bytes(target) for target in targets] == payloads

    def test_how_bytes_are_cut_does_not_matter(self, store: Store) -> None:
        """An object is its bytes, however many buffers they came in or go to."""
        payload = pattern(1, 700_001)
        cuts = [0, 1, 1, 96, 5000, 300_000, 300_007, 700_001]
        pieces = [payload[start:end] for start, end in itertools.pairwise(cuts)]
        assert store.put([make_key(1)], [_views(*pieces)]) == [Status.OK]
        assert _get_one(store, make_key(1), len(payload)) == (Status.OK, payload)
        target = bytearray(len(payload))
        view = memoryview(target)
        ends = [262_000, 262_128, 700_000, 700_001]
        views = [view[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        assert store.get([make_key(1)], [views]) == [Status.OK]
        assert bytes(target) == payload

    def test_buffers_of_other_formats_are_their_bytes(self, store: Store) -> None:
        """A buffer of floats in two dimensions is stored and filled as bytes."""
        source: Any = memoryview(pattern(2, 64)).cast("f", (4, 4))
        assert store.put([make_key(2)], [[source]]) == [Status.OK]
        target: Any = memoryview(bytearray(64)).cast("f", (4, 4))
        assert store.get([make_key(2)], [[target]]) == [Status.OK]
        assert target.tobytes() == source.tobytes()

    def test_every_part_of_a_key_counts(self, store: Store) -> None:
        """Keys that differ in one part are different objects."""
        keys = [
            make_key(1),
            make_key(2),
            make_key(1, boundary=32),
            make_key(1, part="state"),
            make_key(1, salt="x"),
            make_key(1, engine="b"),
        ]
        for number, key in enumerate(keys):
            assert _put_one(store, key, pattern(number, 100)) is Status.OK
        for number, key in enumerate(keys):
            assert _get_one(store, key, 100) == (Status.OK, pattern(number, 100))

    def test_what_is_stored_stays(self, store: Store) -> None:
        """A second put changes nothing, whatever it brings, in the same call too."""
        assert _put_one(store, make_key(1), b"first") is Status.OK
        self.check_existing(_put_one(store, make_key(1), b"other"))
        twice = [make_key(2), make_key(1), make_key(2)]
        first, other, again = store.put(twice, [_views(b"one"), _views(b"two"), _views(b"three")])
        assert (first, again) == (Status.OK, Status.EXISTS)
        self.check_existing(other)
        assert _get_one(store, make_key(1), 5) == (Status.OK, b"first")
        assert _get_one(store, make_key(2), 3) == (Status.OK, b"one")

    def test_results_are_per_key_and_in_order(self, store: Store) -> None:
        """A miss or a wrong size is that key's alone."""
        store.put([make_key(1), make_key(3)], [_views(b"one"), _views(b"three")])
        keys = [make_key(number) for number in (1, 2, 3, 1)]
        targets = [bytearray(size) for size in (3, 3, 4, 3)]
        expected = [Status.OK, Status.MISS, Status.CORRUPT, Status.OK]
        assert store.get(keys, [[memoryview(target)] for target in targets]) == expected
        assert bytes(targets[0]) == bytes(targets[3]) == b"one"
        assert store.exists(keys) == [Status.OK, Status.MISS, Status.OK, Status.OK]

    def test_another_size_is_corrupt(self, store: Store) -> None:
        """Buffers that are shorter or longer than the object are not filled."""
        _put_one(store, make_key(1), pattern(1, 300_000))
        for size in (0, 1, 299_999, 300_001):
            assert _get_one(store, make_key(1), size)[0] is Status.CORRUPT

    def test_removed_objects_are_gone_and_can_be_put_again(self, store: Store) -> None:
        """Removal is per key; a key that comes twice is a miss the second time."""
        store.put([make_key(1), make_key(2)], [_views(b"one"), _views(b"two")])
        assert store.remove([make_key(1), make_key(1), make_key(3)]) == [Status.OK, Status.MISS, Status.MISS]
        assert store.exists([make_key(1), make_key(2)]) == [Status.MISS, Status.OK]
        assert _get_one(store, make_key(1), 3)[0] is Status.MISS
        assert _put_one(store, make_key(1), b"uno") is Status.OK
        assert _get_one(store, make_key(1), 3) == (Status.OK, b"uno")

    def test_clear_removes_what_is_selected(self, store: Store) -> None:
        """By namespace, by salt, by both, or everything."""
        keys = [make_key(n, engine=engine, salt=salt) for engine in "ab" for salt in ("", "x") for n in range(3)]
        store.put(keys, [_views(b"payload")] * len(keys))
        assert store.clear(namespace=keys[0].namespace, salt=salt_tag("x")) == 3
        assert store.clear(salt=salt_tag("y")) == 0
        left = [key for key in keys if (key.namespace, key.salt) != (keys[0].namespace, salt_tag("x"))]
        assert [key for key in keys if store.exists([key]) == [Status.OK]] == left
        assert store.clear(salt=salt_tag("x")) == 3
        assert store.clear(namespace=keys[0].namespace) == 3
        assert store.clear() == 3
        assert store.clear() == 0
        assert store.exists(keys) == [Status.MISS] * len(keys)

    def test_empty_calls_do_nothing(self, store: Store) -> None:
        """No keys, no results."""
        assert store.exists([]) == store.put([], []) == store.get([], []) == store.remove([]) == []
        store.touch([])

    def test_touch_and_register_change_no_bytes(self, store: Store) -> None:
        """Recency and announced memory are invisible; absent keys may be touched."""
        memory = memoryview(bytearray(16))
        store.register(memory)
        memory[:] = pattern(1, 16)
        assert store.put([make_key(1)], [[memory.toreadonly()]]) == [Status.OK]
        store.touch([make_key(1), make_key(2)])
        assert store.exists([make_key(1), make_key(2)]) == [Status.OK, Status.MISS]
        assert _get_one(store, make_key(1), 16) == (Status.OK, pattern(1, 16))

    def test_the_caller_may_reuse_its_buffers(self, store: Store) -> None:
        """A put keeps no reference to the caller's memory."""
        memory = bytearray(pattern(1, 5000))
        assert store.put([make_key(1)], [[memoryview(memory)]]) == [Status.OK]
        memory[:] = bytes(5000)
        memory.clear()
        assert _get_one(store, make_key(1), 5000) == (Status.OK, pattern(1, 5000))

    def test_stats_are_numbers(self, store: Store) -> None:
        """They can be asked for at any time."""
        _put_one(store, make_key(1), b"one")
        assert all(isinstance(name, str) and isinstance(value, int | float) for name, value in store.stats().items())

    def test_closing_twice_is_once(self, store: Store) -> None:
        """The second close does nothing."""
        _put_one(store, make_key(1), b"one")
        store.close()
        store.close()

    def test_objects_are_verified(self, store: Store) -> None:
        """The header makes an object of another size, key, length or cut a failure of that object alone."""
        whole = [StoreObject(make_key(n), 16, _views(pattern(n, 40), pattern(-n, 50_000))) for n in range(3)]
        assert put_objects(store, whole) == [Status.OK] * 3
        wrong = [memoryview(bytearray(size)) for size in (40, 50_000, 50_000, 40, 40, 50_000)]
        wanted = [
            StoreObject(make_key(0), 16, wrong[0:2]),
            StoreObject(make_key(1), 16, wrong[2:4]),
            StoreObject(make_key(2), 15, wrong[4:6]),
            StoreObject(make_key(9), 16, [memoryview(bytearray(1))]),
        ]
        assert get_objects(store, wanted) == [Status.OK, Status.CORRUPT, Status.CORRUPT, Status.MISS]
        assert [bytes(part) for part in wanted[0].parts] == [pattern(0, 40), pattern(0, 50_000)]
        spoiled = pattern(7, HEADER_BYTES + 5)
        assert _put_one(store, make_key(7), spoiled) is Status.OK
        target = StoreObject(make_key(7), 16, [memoryview(bytearray(5))])
        assert get_objects(store, [target]) == [Status.CORRUPT]

    def test_threads_see_whole_objects(self, store: Store) -> None:
        """Writers and readers at once: every OK comes with the right bytes, and one of two writers has stored."""
        keys = [make_key(number) for number in range(40)]
        stored: list[Status] = []
        wrong: list[str] = []

        def write() -> None:
            for number, key in enumerate(keys):
                stored.append(_put_one(store, key, pattern(number, 10_000 + number)))

        def read() -> None:
            for _ in range(3):
                for number, key in enumerate(keys):
                    status, found = _get_one(store, key, 10_000 + number)
                    if status is Status.OK and found != pattern(number, 10_000 + number):
                        wrong.append(key.text)

        threads = [threading.Thread(target=target) for target in (write, write, read, read)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert stored.count(Status.OK) + stored.count(Status.EXISTS) == 80
        assert stored.count(Status.OK) == 40 or not self.tells_existing
        assert all(
            _get_one(store, key, 10_000 + number) == (Status.OK, pattern(number, 10_000 + number))
            for number, key in enumerate(keys)
        )
