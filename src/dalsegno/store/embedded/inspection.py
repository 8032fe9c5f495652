"""Looking through an embedded store: what is in it, and whether all of it is as it should be."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import lmdb
import xxhash

from dalsegno.store.embedded.embedded_store import EmbeddedStore
from dalsegno.store.embedded.environment import TOTALS_KEY, Environment
from dalsegno.store.embedded.records import Record, Totals, charge_of, piece_key, recency_key
from dalsegno.store.keys import StoreKey
from dalsegno.store.objects import HEADER_BYTES, OBJECT_VERSION, unpack_header

__all__ = ["StoredEntry", "list_store", "verify_store"]

_BATCH = 64


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """One object in the listing: its key, its size with header, and when it was used (larger is later)."""

    key: StoreKey
    num_bytes: int
    tick: int


def list_store(store: EmbeddedStore) -> Iterator[StoredEntry]:
    """Yield the objects by their keys' digests; those that come or go meanwhile may be missed.

    Raises:
        lmdb.Error: the file is damaged.
    """
    environment = store.environment
    if environment is None:
        return
    for _, record in _records(environment):
        yield StoredEntry(StoreKey.from_text(record.key_text.decode("ascii")), record.num_bytes, record.tick)


def verify_store(store: EmbeddedStore, progress: Callable[[int], None] | None = None) -> list[str]:
    """Read everything; return one line for each fault found.

    An object without a header of its own is checked as far as the tables go.

    Args:
        store: it may be in use; what changes meanwhile is no fault.
        progress: called now and then with the number of objects checked.
    """
    environment = store.environment
    if environment is None:
        return ["the disk has no room for the store"]
    faults: list[str] = []
    try:
        for number, (digest, _) in enumerate(_records(environment), 1):
            with environment.read() as txn:
                faults += _faults_of(environment, txn, digest)
            if progress is not None:
                progress(number)
        with environment.read() as txn:
            faults += _faults_of_totals(environment, txn)
    except lmdb.Error as error:
        faults.append(f"the file is damaged: {error}")
    return faults


def _records(environment: Environment) -> Iterator[tuple[bytes, Record]]:
    """Yield digests and records, in transactions of bounded length."""
    last = b""
    while True:
        with environment.read() as txn, txn.cursor(db=environment.objects) as cursor:
            batch: list[tuple[bytes, Record]] = []
            found = cursor.set_range(last + b"\0") if last else cursor.first()
            while found and len(batch) < _BATCH:
                batch.append((bytes(cursor.key()), Record.unpack(cursor.value())))
                found = cursor.next()
        if not batch:
            return
        yield from batch
        last = batch[-1][0]


def _faults_of(environment: Environment, txn: "lmdb.Transaction[memoryview]", digest: bytes) -> Iterator[str]:
    value = txn.get(digest, db=environment.objects)
    if value is None:
        return
    record = Record.unpack(value)
    name = record.key_text.decode("ascii", "replace")
    try:
        key = StoreKey.from_text(name)
    except ValueError as error:
        yield str(error)
        return
    if key.digest != digest or key.boundary != record.boundary:
        yield f"{name}: is under another key"
    if txn.get(recency_key(record.tick, record.boundary, digest), db=environment.recency) is None:
        yield f"{name}: has no place in the order of eviction"
    numbers = range(record.first_piece, record.first_piece + record.num_pieces)
    pieces = [txn.get(piece_key(number), db=environment.pieces) for number in numbers]
    present = [piece for piece in pieces if piece is not None]
    if len(present) < len(pieces) or sum(map(len, present)) != record.num_bytes:
        yield f"{name}: bytes are missing"
    elif fault := _payload_fault(key, present):
        yield f"{name}: {fault}"


def _payload_fault(key: StoreKey, pieces: list[memoryview]) -> str | None:
    header = unpack_header(pieces[0]) if pieces and len(pieces[0]) >= HEADER_BYTES else None
    if header is None or header.version != OBJECT_VERSION:
        return None
    if header.key_digest != key.digest or header.boundary != key.boundary:
        return "the header names another object"
    state = xxhash.xxh3_128(pieces[0][HEADER_BYTES:])
    for piece in pieces[1:]:
        state.update(piece)
    if sum(map(len, pieces)) != HEADER_BYTES + header.payload_bytes or state.digest() != header.checksum:
        return "the checksum is wrong"
    return None


def _faults_of_totals(environment: Environment, txn: "lmdb.Transaction[memoryview]") -> Iterator[str]:
    totals = Totals.unpack(txn.get(TOTALS_KEY) or Totals().pack())
    used = count = num_pieces = 0
    with txn.cursor(db=environment.objects) as cursor:
        for _, value in cursor:
            record = Record.unpack(value)
            used += charge_of(record.num_bytes)
            count += 1
            num_pieces += record.num_pieces
    if (count, used) != (totals.num_objects, totals.used_bytes):
        yield f"{count} objects of {used} bytes, but {totals.num_objects} of {totals.used_bytes} are on record"
    if txn.stat(environment.recency)["entries"] != count:
        yield "the order of eviction lists objects that are not there"
    if txn.stat(environment.pieces)["entries"] != num_pieces:
        yield "there are bytes that belong to no object"
