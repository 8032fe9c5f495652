"""Slab memory of the host as a connector sees it."""

from dataclasses import dataclass

from dalsegno.kv.layout import MemoryLayout

__all__ = ["HostBytes"]


@dataclass(frozen=True, slots=True)
class HostBytes:
    """Implements `dalsegno.connector.base.BlockMemory` over the slabs of a layout."""

    layout: MemoryLayout
    memory: memoryview
    path: str | None = None

    def spans(self, group_id: int, block: int, num_tokens: int) -> list[tuple[int, int]]:
        """See `BlockMemory.spans`."""
        return self.layout.spans(group_id, block, num_tokens)
