"""How device memory is cut: groups of layers, their blocks, and the slabs that hold the blocks.

Memory is `num_slabs` slabs of equal bytes. A slab is bound to one group at a time and cut into that group's blocks, so
small attention blocks live beside states of megabytes and nothing is padded to the largest of them. Slab 0 belongs to
no group: its first bytes are every group's null block.

Inside a block the parts of a layer follow each other, layer by layer; a part of a paged group is token-major
(`[block_size, *shape]`), a part of the state group is `[*shape]`. Parts start at multiples of 64 bytes and blocks at
multiples of 256.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from dalsegno.config import CacheConfig
from dalsegno.errors import OptionError
from dalsegno.types import GroupKind, LayerCacheSpec

__all__ = ["GroupSpec", "MemoryLayout", "plan_layout"]

_PART_ALIGNMENT = 64
_BLOCK_ALIGNMENT = 256
_DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "uint8": 1}


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers that share one block table.

    Attributes:
        group_id: index of the group in `MemoryLayout.groups`.
        block_size: tokens per block; for the state group the hash unit, since a block holds one state.
        block_bytes: bytes of one block, all layers.
        blocks_per_slab: k, blocks cut from one slab.
        layers: the layers, in order.
        part_offsets: byte offset of every part inside a block, per layer.
        window: tokens a window layer sees (itself included), else None.
        prefix: "fine" (hits at any hash boundary) or "none" (takes no part in lookup and hand-off).
    """

    group_id: int
    kind: GroupKind
    block_size: int
    block_bytes: int
    blocks_per_slab: int
    layers: tuple[LayerCacheSpec, ...]
    part_offsets: tuple[tuple[int, ...], ...]
    window: int | None = None
    prefix: str = "fine"

    @property
    def name(self) -> str:
        """The group's name in reports: its kind."""
        return self.kind.value

    @property
    def is_state(self) -> bool:
        """Whether a block holds one recurrent state instead of tokens."""
        return self.kind is GroupKind.STATE


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """The groups and the slabs they share."""

    groups: tuple[GroupSpec, ...]
    slab_bytes: int
    num_slabs: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all slabs."""
        return self.slab_bytes * self.num_slabs

    @property
    def state_group(self) -> GroupSpec | None:
        """The group of recurrent layers, if the model has any."""
        return next((group for group in self.groups if group.is_state), None)

    @property
    def paged_groups(self) -> tuple[GroupSpec, ...]:
        """The groups whose blocks hold tokens."""
        return tuple(group for group in self.groups if not group.is_state)

    def address(self, group_id: int, block_id: int) -> int:
        """Byte offset of a block; block 0 is the null block at offset 0."""
        group = self.groups[group_id]
        slab, position = divmod(block_id, group.blocks_per_slab)
        return slab * self.slab_bytes + position * group.block_bytes

    def spans(self, group_id: int, block_id: int, num_tokens: int) -> list[tuple[int, int]]:
        """Return (offset, length) of the bytes of a block's first tokens, or of its state, in order of layer and part.

        Neighbours are joined, so that a full block without padding is one span.
        """
        begin = self.address(group_id, block_id)
        return [(begin + offset, length) for offset, length in _spans_in_block(self.groups[group_id], num_tokens)]

    def with_slabs(self, num_slabs: int) -> "MemoryLayout":
        """The same cut over another number of slabs."""
        return replace(self, num_slabs=num_slabs)


def plan_layout(
    specs: Sequence[LayerCacheSpec], config: CacheConfig, memory_bytes: int | None = None, num_slabs: int | None = None
) -> MemoryLayout:
    """Cut memory into slabs for a model's layers.

    Args:
        specs: what each layer keeps.
        config: block and hash unit sizes.
        memory_bytes: device memory to use; rounded down to whole slabs.
        num_slabs: the number of slabs instead, the null slab included.

    Returns:
        Groups in the order attention, window, state (those the model has).

    Raises:
        OptionError: the memory does not hold the null slab and one more.
    """
    by_kind = {kind: [spec for spec in specs if spec.kind is kind] for kind in GroupKind}
    drafts = [_draft_group(kind, layers, config) for kind, layers in by_kind.items() if layers]
    if not drafts:
        raise OptionError("the model has no layer that keeps anything between steps: nothing to serve it from")
    first = drafts[0].block_bytes
    largest = max(group.block_bytes for group in drafts)
    slab_bytes = largest if drafts[0].is_state else math.ceil(largest / first) * first
    groups = tuple(
        replace(group, group_id=i, blocks_per_slab=slab_bytes // group.block_bytes) for i, group in enumerate(drafts)
    )
    if num_slabs is None:
        num_slabs = (memory_bytes or 0) // slab_bytes
    if num_slabs < 2:
        raise OptionError(
            f"kv_cache_memory_bytes={memory_bytes} holds {max(num_slabs, 0)} slabs of {slab_bytes} bytes; "
            f"at least {2 * slab_bytes} bytes are needed"
        )
    return MemoryLayout(groups=groups, slab_bytes=slab_bytes, num_slabs=num_slabs)


@lru_cache(maxsize=4096)
def _spans_in_block(group: GroupSpec, num_tokens: int) -> tuple[tuple[int, int], ...]:
    tokens = 1 if group.is_state else num_tokens
    spans: list[tuple[int, int]] = []
    for layer, offsets in zip(group.layers, group.part_offsets, strict=True):
        for part, offset in zip(layer.parts, offsets, strict=True):
            length = tokens * math.prod(part.shape) * _DTYPE_BYTES[part.dtype]
            if spans and sum(spans[-1]) == offset:
                offset, before = spans.pop()
                length += before
            spans.append((offset, length))
    return tuple(spans)


def _draft_group(kind: GroupKind, layers: list[LayerCacheSpec], config: CacheConfig) -> GroupSpec:
    """Lay out one block of a group; group_id and blocks_per_slab are filled in by the caller."""
    is_state = kind is GroupKind.STATE
    tokens = 1 if is_state else config.block_size
    offsets: list[tuple[int, ...]] = []
    end = 0
    for layer in layers:
        layer_offsets = []
        for part in layer.parts:
            start = _round_up(end, _PART_ALIGNMENT)
            layer_offsets.append(start)
            end = start + tokens * math.prod(part.shape) * _DTYPE_BYTES[part.dtype]
        offsets.append(tuple(layer_offsets))
    windows = {layer.window for layer in layers}
    assert len(windows) == 1, f"layers of one group must share a window, got {windows}"
    return GroupSpec(
        group_id=0,
        kind=kind,
        block_size=config.hash_block_size if is_state else config.block_size,
        block_bytes=_round_up(end, _BLOCK_ALIGNMENT),
        blocks_per_slab=1,
        layers=tuple(layers),
        part_offsets=tuple(offsets),
        window=windows.pop(),
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
