"""A store that knows what every key must hold, and notes at put time what is not that.

It is told the token sequences that engines may work on. A put of a prefix it was not told of, or of other bytes than a
cold computation gives, is a failure and does not enter the store inside. Puts come on threads whose exceptions are
part of what is tested, so failures are collected; `check` raises them in the test.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dalsegno.connector.store.objects import ObjectMap
from dalsegno.hashing.block_hash import extend_block_hashes, root_hash, to_token_array
from dalsegno.kv.layout import GroupSpec, MemoryLayout
from dalsegno.store.base import Buffers, Status, Store, flat_view
from dalsegno.store.keys import StoreKey, salt_tag
from dalsegno.store.objects import HEADER_BYTES, OBJECT_VERSION, payload_checksum, unpack_header
from dalsegno.store.wrappers.wrapped import WrappedStore
from dalsegno.testing.fake_memory import POISON
from dalsegno.testing.fake_worker import extend_cells
from dalsegno.types import BlockHash

__all__ = ["AuditedObject", "AuditingStore", "Auditor", "CellAuditor", "PrefixBook"]


@dataclass(frozen=True, slots=True)
class AuditedObject:
    """What a put claims to be.

    Attributes:
        group: whose blocks it holds.
        token_ids: the whole prefix up to its boundary.
        first_token: its first token; 0 for a state.
        payload: its bytes without the header.
        namespace: of its key; says which ranks' bytes they are.
    """

    group: GroupSpec
    token_ids: Sequence[int]
    first_token: int
    payload: bytes
    namespace: str


class Auditor(Protocol):
    """Knows what an object holds after a cold run."""

    def difference(self, claimed: AuditedObject) -> str | None:
        """Say what is wrong with the payload; None if nothing is. Called on the threads that put."""
        ...


class PrefixBook:
    """Which tokens are behind a hash, for every prefix of what it was told. Safe to use from several threads."""

    def __init__(self, unit: int) -> None:
        """Know nothing; `unit` is H."""
        self._unit = unit
        self._known: dict[BlockHash, tuple[str, Sequence[int], int]] = {}

    def learn(self, token_ids: Iterable[int], salt: str | None = None) -> None:
        """Note every full unit of a prompt with its answer."""
        tokens = to_token_array(token_ids)
        hashes: list[BlockHash] = []
        extend_block_hashes(root_hash(self._unit, salt), hashes, tokens, self._unit)
        tag = salt_tag(salt)
        for count, block_hash in enumerate(hashes, 1):
            self._known.setdefault(block_hash, (tag, tokens, count * self._unit))

    def find(self, block_hash: BlockHash) -> tuple[str, list[int]] | None:
        """Return (salt tag, tokens) of a prefix."""
        found = self._known.get(block_hash)
        return None if found is None else (found[0], list(found[1][: found[2]]))


class AuditingStore(WrappedStore):
    """Puts only what is right into the store inside.

    Attributes:
        book: what it was told.
        failures: what was wrong, in words.
        num_audited: puts that were right.
    """

    def __init__(
        self,
        inner: Store,
        layout: MemoryLayout,
        unit: int,
        object_tokens: int,
        auditor: Auditor,
        *,
        namespaces: Iterable[str] | None = None,
    ) -> None:
        """Wrap `inner`.

        Args:
            inner: the store.
            layout: of all engines that use it.
            unit: H.
            object_tokens: tokens per object of full attention.
            auditor: what a cold run gives.
            namespaces: those that keys may have; None for any.
        """
        super().__init__(inner)
        self.book = PrefixBook(unit)
        self.failures: list[str] = []
        self.num_audited = 0
        self._groups = {group.name: group for group in layout.groups}
        self._objects = ObjectMap(layout, object_tokens)
        self._auditor = auditor
        self._namespaces = None if namespaces is None else frozenset(namespaces)
        self._lock = threading.Lock()

    def put(self, keys: Sequence[StoreKey], buffers: Sequence[Buffers]) -> list[Status]:
        """See `Store.put`; ERROR for what fails the audit."""
        taken = [b"".join(map(flat_view, pieces)) for pieces in buffers]
        found = [self._audit(key, value) for key, value in zip(keys, taken, strict=True)]
        right = [i for i, problem in enumerate(found) if problem is None]
        # The bytes that were audited are the bytes that are put.
        done = self.inner.put([keys[i] for i in right], [[memoryview(taken[i])] for i in right])
        statuses = dict(zip(right, done, strict=True))
        with self._lock:
            self.failures += [f"{key.text}: {problem}" for key, problem in zip(keys, found, strict=True) if problem]
            self.num_audited += len(right)
        return [statuses.get(i, Status.ERROR) for i in range(len(keys))]

    def check(self) -> None:
        """Raise AssertionError with everything that was wrong so far."""
        with self._lock:
            assert not self.failures, "\n".join([f"{len(self.failures)} wrong puts", *self.failures[:8]])

    def _audit(self, key: StoreKey, value: bytes) -> str | None:
        try:
            return self._key_problem(key) or self._header_problem(key, value) or self._difference(key, value)
        except Exception as error:
            return f"the audit itself raised {type(error).__name__}: {error}"

    def _key_problem(self, key: StoreKey) -> str | None:
        prefix = self.book.find(key.block_hash)
        if prefix is None:
            return "nobody works on this prefix"
        salt, tokens = prefix
        if key.part not in self._groups:
            return f"there is no group {key.part}"
        if self._namespaces is not None and key.namespace not in self._namespaces:
            return "no engine has this namespace"
        if (key.salt, key.boundary) != (salt, len(tokens)):
            return f"its hash is that of {len(tokens)} tokens of salt {salt}"
        return None

    def _header_problem(self, key: StoreKey, value: bytes) -> str | None:
        header, payload = unpack_header(value), memoryview(value)[HEADER_BYTES:]
        if header is None:
            return "it has no header"
        group = self._groups[key.part]
        num_tokens = 1 if group.is_state else key.boundary - self._objects.first_token(group, key.boundary)
        claimed = (header.version, header.key_digest, header.boundary, header.num_tokens, header.payload_bytes)
        expected = (OBJECT_VERSION, key.digest, key.boundary, num_tokens, len(payload))
        if claimed != expected:
            return f"its header says {claimed} instead of {expected}"
        return None if header.checksum == payload_checksum([payload]) else "its checksum is another payload's"

    def _difference(self, key: StoreKey, value: bytes) -> str | None:
        group = self._groups[key.part]
        prefix = self.book.find(key.block_hash)
        assert prefix is not None, "the prefix was found before"
        first = self._objects.first_token(group, key.boundary)
        return self._auditor.difference(AuditedObject(group, prefix[1], first, value[HEADER_BYTES:], key.namespace))


class CellAuditor:
    """What `FakeWorker` computes: cells that follow from the tokens alone, equal to the last bit."""

    def __init__(self, masks: Mapping[tuple[str, int], int] | None = None) -> None:
        """Expect masked cells: `masks` by namespace and group, see `rank_mask`; None where there is one rank."""
        self._masks = masks

    def difference(self, claimed: AuditedObject) -> str | None:
        """See `Auditor.difference`."""
        cells: list[int] = []
        extend_cells(cells, claimed.token_ids)
        expected = cells[-1:] if claimed.group.is_state else cells[claimed.first_token :]
        mask = 0 if self._masks is None else self._masks[claimed.namespace, claimed.group.group_id]
        stored = np.frombuffer(claimed.payload, dtype=np.int64)
        found = np.where(stored == POISON, stored, stored ^ mask).tolist()
        if found == expected:
            return None
        wrong = [i for i, (cell, right) in enumerate(zip(found, expected, strict=False)) if cell != right]
        return f"{len(found)} cells instead of {len(expected)}, wrong are {wrong[:8]} (poisoned: {found.count(-1)})"
