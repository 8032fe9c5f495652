"""What the tables say, within one writing transaction: adding, dropping and evicting objects, and their recency.

Invariant: for each object there is one record, one recency entry under its tick and boundary, and its pieces; `totals`
has their sums. All of it changes in one transaction, so it holds whatever is killed.
"""

from collections.abc import Iterator

import lmdb

from dalsegno.store.base import Buffers
from dalsegno.store.embedded.environment import TOTALS_KEY, Environment
from dalsegno.store.embedded.pieces import gather
from dalsegno.store.embedded.records import Record, Totals, charge_of, piece_key, recency_key
from dalsegno.store.keys import StoreKey

__all__ = ["Catalog"]

_GROUP_BYTES = 16
"""Tick and boundary in front of a recency key: objects that agree in both are evicted together."""


class Catalog:
    """A writing transaction's view; `save` writes the totals back."""

    def __init__(self, environment: Environment, txn: "lmdb.Transaction[bytes]") -> None:
        """Read the totals."""
        self._txn = txn
        self._objects = environment.objects
        self._pieces = environment.pieces
        self._recency = environment.recency
        self.totals = Totals.unpack(txn.get(TOTALS_KEY) or Totals().pack())

    def save(self) -> None:
        """Write the totals; once, at the end."""
        self._txn.put(TOTALS_KEY, self.totals.pack())

    def take_tick(self) -> int:
        """Return a tick newer than all others."""
        tick = self.totals.next_tick
        self.totals.next_tick += 1
        return tick

    def find(self, digest: bytes) -> Record | None:
        """Return an object's record."""
        value = self._txn.get(digest, db=self._objects)
        return None if value is None else Record.unpack(value)

    def add(self, key: StoreKey, buffers: Buffers, num_bytes: int, tick: int, scratch: memoryview) -> None:
        """Store an object that is not there yet."""
        first = number = self.totals.next_piece
        for piece in gather(buffers, scratch):
            self._txn.put(piece_key(number), piece, append=True, db=self._pieces)
            number += 1
        record = Record(tick, key.boundary, num_bytes, first, number - first, key.text.encode("ascii"))
        self._txn.put(key.digest, record.pack(), db=self._objects)
        self._txn.put(recency_key(tick, key.boundary, key.digest), b"", db=self._recency)
        self.totals.next_piece = number
        self.totals.num_objects += 1
        self.totals.used_bytes += charge_of(num_bytes)

    def drop(self, digest: bytes, record: Record) -> None:
        """Remove an object."""
        for number in range(record.first_piece, record.first_piece + record.num_pieces):
            self._txn.delete(piece_key(number), db=self._pieces)
        self._txn.delete(recency_key(record.tick, record.boundary, digest), db=self._recency)
        self._txn.delete(digest, db=self._objects)
        self.totals.num_objects -= 1
        self.totals.used_bytes -= charge_of(record.num_bytes)

    def use(self, digest: bytes, tick: int) -> None:
        """Give an object a new tick, if it is there."""
        record = self.find(digest)
        if record is None:
            return
        self._txn.delete(recency_key(record.tick, record.boundary, digest), db=self._recency)
        self._txn.put(recency_key(tick, record.boundary, digest), b"", db=self._recency)
        renewed = Record(
            tick, record.boundary, record.num_bytes, record.first_piece, record.num_pieces, record.key_text
        )
        self._txn.put(digest, renewed.pack(), db=self._objects)

    def evict(self, num_bytes: int, before_tick: int) -> None:
        """Evict objects with an older tick until `num_bytes` more fit the bound, or none is left.

        The oldest tick goes first, in it the longest prefix, and whatever has the same tick and boundary with it: a
        state is of no use without the attention below it, nor is a prefix's last attention without its state.
        """
        group = b""
        for entry in self._oldest():
            fits = self.totals.used_bytes + num_bytes <= self.totals.budget_bytes
            if int.from_bytes(entry[:8], "big") >= before_tick or (fits and entry[:_GROUP_BYTES] != group):
                return
            group = entry[:_GROUP_BYTES]
            digest = entry[_GROUP_BYTES:]
            record = self.find(digest)
            assert record is not None, "a recency entry has an object"
            self.drop(digest, record)
            self.totals.evicted_objects += 1
            self.totals.evicted_bytes += record.num_bytes

    def charge_since(self, tick: int) -> int:
        """Return what the objects of this tick and newer ones count against the bound."""
        total = 0
        with self._txn.cursor(db=self._recency) as cursor:
            if cursor.set_range(recency_key(tick, 2**63 - 1, b"")):
                for entry in cursor.iternext(values=False):
                    record = self.find(entry[_GROUP_BYTES:])
                    total += 0 if record is None else charge_of(record.num_bytes)
        return total

    def _oldest(self) -> Iterator[bytes]:
        """Yield recency keys in order of eviction; each is gone before the next is asked for."""
        while True:
            with self._txn.cursor(db=self._recency) as cursor:
                if not cursor.first():
                    return
                entry = cursor.key()
            yield entry
