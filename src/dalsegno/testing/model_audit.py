"""What a real model gives for a key: its prefix computed cold, in one step, in memory that nothing else uses.

Values may differ by 1e-4·(1 + the largest of their part), as the order of sums does; everything else is exact.
"""

import threading
from collections.abc import Iterator, Sequence
from math import prod

import torch

from dalsegno.hashing.block_hash import to_token_array
from dalsegno.kv.layout import GroupSpec, MemoryLayout
from dalsegno.models.base import CausalLM
from dalsegno.testing.auditing_store import AuditedObject
from dalsegno.types import NULL_BLOCK, ScheduledRequest, StateStep, StepPlan
from dalsegno.worker.model_worker import ModelWorker

__all__ = ["ModelAuditor"]

_TOLERANCE = 1e-4


class ModelAuditor:
    """Implements `dalsegno.testing.auditing_store.Auditor` for prefixes of up to `max_tokens` tokens."""

    def __init__(self, model: CausalLM, layout: MemoryLayout, max_tokens: int) -> None:
        """Compute with `model`, in blocks cut as those of `layout` are."""
        self._first_slab: list[int] = []
        num_slabs = 1
        for group in layout.groups:
            self._first_slab.append(num_slabs)
            num_blocks = 1 if group.is_state else -(-max_tokens // group.block_size)
            num_slabs += -(-num_blocks // group.blocks_per_slab)
        self._layout = layout.with_slabs(num_slabs)
        self._worker = ModelWorker(model, self._layout, torch.device("cpu"))
        self._bytes = self._worker.memory.host_bytes()
        self._lock = threading.Lock()

    def difference(self, claimed: AuditedObject) -> str | None:
        """See `Auditor.difference`."""
        with self._lock:
            self._compute(claimed.token_ids)
            expected = b"".join(self._pieces(claimed))
        if len(expected) != len(claimed.payload):
            return f"{len(claimed.payload)} bytes instead of {len(expected)}"
        offset = 0
        for name, dtype, count in self._parts(claimed):
            found, right = (
                torch.frombuffer(bytearray(payload), dtype=dtype, count=count, offset=offset).double()
                for payload in (claimed.payload, expected)
            )
            offset += count * dtype.itemsize
            apart = float((found - right).abs().max())
            # Written so that a value that is not a number is apart.
            if not apart <= _TOLERANCE * (1 + float(right.abs().max())):
                return f"{name} is {apart} apart"
        return None

    def _compute(self, token_ids: Sequence[int]) -> None:
        state = None
        tables: list[list[int]] = []
        for group in self._layout.groups:
            first = self._first_block(group)
            count = 0 if group.is_state else -(-len(token_ids) // group.block_size)
            tables.append([first + i for i in range(count)])
            if group.is_state:
                state = StateStep(NULL_BLOCK, first)
        request = ScheduledRequest("audit", to_token_array(token_ids), 0, tuple(tables), state, None)
        self._worker.execute(StepPlan(1, (request,)))

    def _pieces(self, claimed: AuditedObject) -> Iterator[memoryview]:
        for block, count in self._blocks(claimed):
            for offset, length in self._bytes.spans(claimed.group.group_id, block, count):
                yield self._bytes.memory[offset : offset + length]

    def _parts(self, claimed: AuditedObject) -> Iterator[tuple[str, torch.dtype, int]]:
        """Name, dtype and number of values of every piece of the payload, in order."""
        for block, count in self._blocks(claimed):
            for layer in claimed.group.layers:
                for part in layer.parts:
                    name = f"{part.name} of layer {layer.layer} in block {block - self._first_block(claimed.group)}"
                    yield name, getattr(torch, part.dtype), prod(part.shape) * count

    def _blocks(self, claimed: AuditedObject) -> Iterator[tuple[int, int]]:
        """The blocks that were computed for the object, each with its number of tokens."""
        group, first_block = claimed.group, self._first_block(claimed.group)
        if group.is_state:
            yield first_block, 1
            return
        for first in range(claimed.first_token, len(claimed.token_ids), group.block_size):
            yield first_block + first // group.block_size, min(group.block_size, len(claimed.token_ids) - first)

    def _first_block(self, group: GroupSpec) -> int:
        return self._first_slab[group.group_id] * group.blocks_per_slab
