"""From an object's blocks to the buffers that hold, or take, its bytes."""

from collections.abc import Iterator

from dalsegno.connector.base import BlockMemory
from dalsegno.connector.store.messages import StoredObject
from dalsegno.kv.layout import MemoryLayout
from dalsegno.types import NULL_BLOCK

__all__ = ["buffers_of", "num_tokens_of"]


def num_tokens_of(layout: MemoryLayout, item: StoredObject) -> int:
    """Tokens whose bytes the object holds; 1 for a state."""
    return 1 if layout.groups[item.group_id].is_state else item.boundary - item.first_token


def buffers_of(memory: BlockMemory, layout: MemoryLayout, item: StoredObject) -> list[memoryview]:
    """Return the memory of the object's bytes, in order, without a copy.

    Where the null block stands for bytes of a load that nobody wants, fresh memory takes them.
    """
    flat = memory.memory
    buffers: list[memoryview] = []
    for block, count in _blocks(layout, item):
        spans = memory.spans(item.group_id, block, count)
        if block == NULL_BLOCK:
            buffers += (memoryview(bytearray(length)) for _, length in spans)
        else:
            buffers += (flat[offset : offset + length] for offset, length in spans)
    return buffers


def _blocks(layout: MemoryLayout, item: StoredObject) -> Iterator[tuple[int, int]]:
    """Each block with the number of its tokens that belong to the object."""
    group = layout.groups[item.group_id]
    left = num_tokens_of(layout, item)
    for block in item.blocks:
        count = min(left, 1 if group.is_state else group.block_size)
        yield block, count
        left -= count
    assert left == 0, f"an object of {item.boundary - item.first_token} tokens has {len(item.blocks)} blocks"
