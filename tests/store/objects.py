"""Objects of the process tests: number, size and bytes follow from each other."""

from collections.abc import Iterable

from dalsegno.store.base import Status, Store
from dalsegno.store.objects import StoreObject, get_objects, put_objects
from dalsegno.testing.store_contract import make_key

__all__ = ["put_number", "size_of", "verified"]


def size_of(number: int) -> int:
    """Bytes of an object: a few hundred to a few hundred thousand."""
    return (number * 7919) % 300_000 + 100


def _numbered(number: int) -> bytes:
    return number.to_bytes(8, "little") * (-(-size_of(number) // 8))


def put_number(store: Store, number: int) -> Status:
    """Put the object of a number."""
    payload = _numbered(number)[: size_of(number)]
    [status] = put_objects(store, [StoreObject(make_key(number), 16, [memoryview(payload)])])
    return status


def verified(store: Store, numbers: Iterable[int]) -> dict[int, Status]:
    """Read objects; one that is OK has the right bytes, or this raises."""
    found = {}
    for number in numbers:
        target = bytearray(size_of(number))
        [found[number]] = get_objects(store, [StoreObject(make_key(number), 16, [memoryview(target)])])
        assert found[number] is not Status.OK or target == _numbered(number)[: len(target)], f"{number}: wrong bytes"
    return found
