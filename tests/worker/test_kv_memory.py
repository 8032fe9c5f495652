"""Slab memory: every view is where the layout says, copies move their tokens and no other byte."""

import pytest
import torch
from torch import Tensor

from dalsegno.config import CacheConfig
from dalsegno.kv.layout import MemoryLayout, plan_layout
from dalsegno.ops.views import PagedView, StateView
from dalsegno.types import BlockCopy, CachePart, GroupKind, LayerCacheSpec
from dalsegno.worker.kv_memory import KVMemory

_SHAPES: dict[GroupKind, tuple[tuple[str, tuple[int, ...]], ...]] = {
    GroupKind.ATTENTION: (("key", (2, 8)), ("value", (2, 8))),
    GroupKind.WINDOW: (("key", (1, 24)), ("value", (1, 24))),
    GroupKind.STATE: (("conv", (7, 3)), ("recurrent", (2, 16, 20))),
}


def _layout(block_size: int = 16, dtype: str = "float32", num_slabs: int = 6) -> MemoryLayout:
    kinds = [GroupKind.STATE, GroupKind.ATTENTION, GroupKind.WINDOW, GroupKind.STATE, GroupKind.ATTENTION]
    specs = []
    for layer, kind in enumerate(kinds):
        # States stay float32 whatever the cache's dtype, so that dtypes mix inside one slab.
        parts = tuple(
            CachePart(name, shape, "float32" if name == "recurrent" else dtype) for name, shape in _SHAPES[kind]
        )
        specs.append(LayerCacheSpec(layer, kind, parts, 32 if kind is GroupKind.WINDOW else None))
    return plan_layout(specs, CacheConfig(block_size=block_size), num_slabs=num_slabs)


def _parts(memory: KVMemory, layer: int) -> dict[str, Tensor]:
    view = memory.views[layer]
    return view.parts if isinstance(view, StateView) else {"key": view.key, "value": view.value}


LAYOUTS = [
    pytest.param(_layout(), id="float32"),
    pytest.param(_layout(64), id="B=64"),
    pytest.param(_layout(1024), id="B=1024"),
    pytest.param(_layout(dtype="bfloat16"), id="bfloat16"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_part_lies_where_the_layout_says(layout: MemoryLayout) -> None:
    memory = KVMemory(layout, "cpu")
    for group in layout.groups:
        for spec, offsets in zip(group.layers, group.part_offsets, strict=True):
            for (name, part), offset in zip(_parts(memory, spec.layer).items(), offsets, strict=True):
                tokens = () if group.is_state else (group.block_size,)
                shape = next(p.shape for p in spec.parts if p.name == name)
                assert part.shape == (layout.num_slabs, group.blocks_per_slab, *tokens, *shape)
                for block in range(layout.num_slabs * group.blocks_per_slab):
                    address = (part[block // group.blocks_per_slab, block % group.blocks_per_slab].data_ptr()) - (
                        memory.memory.data_ptr()
                    )
                    assert address == layout.address(group.group_id, block) + offset


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_of_a_slab_do_not_overlap(layout: MemoryLayout) -> None:
    memory = KVMemory(layout, "cpu")
    for group in layout.groups:
        memory.memory.zero_()
        total = 0
        for spec in group.layers:
            for part in _parts(memory, spec.layer).values():
                part.view(torch.uint8).add_(1)
                total += part.numel() * part.element_size()
        assert int(memory.memory.max()) == 1
        assert int(memory.memory.sum(dtype=torch.int64)) == total


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_moves_its_tokens_in_all_layers_and_nothing_else(layout: MemoryLayout) -> None:
    memory = KVMemory(layout, "cpu")
    memory.memory.random_(0, 255)
    for group in layout.groups:
        k = group.blocks_per_slab
        source, target, count = 2 * k, 4 * k + k - 1, 1 if group.is_state else group.block_size // 2 + 1
        expected = KVMemory(layout, "cpu")
        expected.memory.copy_(memory.memory)
        for spec in group.layers:
            for part in _parts(expected, spec.layer).values():
                if group.is_state:
                    part[4, k - 1] = part[2, 0]
                else:
                    part[4, k - 1, :count] = part[2, 0, :count]
        memory.copy_blocks([BlockCopy(group.group_id, source, target, count)])
        assert torch.equal(memory.memory, expected.memory)


def test_copies_of_many_blocks_keep_their_order() -> None:
    layout = _layout()
    memory = KVMemory(layout, "cpu")
    view = memory.views[1]
    assert isinstance(view, PagedView)
    k = view.blocks_per_slab
    ids = [k, k + 1, 2 * k, 2 * k + 1, 3 * k]
    for block in ids:
        view.key[block // k, block % k] = block
    # A chain, a source that is written later, a target written twice, and a different number of tokens each.
    steps = [(ids[0], ids[1], 16), (ids[1], ids[2], 8), (ids[3], ids[0], 3), (ids[4], ids[2], 2), (ids[4], ids[3], 1)]
    memory.copy_blocks([BlockCopy(0, source, target, count) for source, target, count in steps])
    held = {block: view.key[block // k, block % k, :, 0, 0].tolist() for block in ids}
    assert held[ids[0]] == [ids[3]] * 3 + [ids[0]] * 13
    assert held[ids[1]] == [ids[0]] * 16
    assert held[ids[2]] == [ids[4]] * 2 + [ids[0]] * 6 + [ids[2]] * 8
    assert held[ids[3]] == [ids[4]] + [ids[3]] * 15


def test_the_null_block_starts_as_zeros_and_is_never_written() -> None:
    layout = _layout()
    memory = KVMemory(layout, "cpu")
    assert not bool(memory.memory.any())
    for group in layout.groups:
        for copy in (BlockCopy(group.group_id, 0, 40, 1), BlockCopy(group.group_id, 40, 0, 1)):
            with pytest.raises(AssertionError, match="null block"):
                memory.copy_blocks([copy])
        with pytest.raises(AssertionError, match="null block"):
            memory.poison(group.group_id, [3, 0])


def test_a_copy_longer_than_a_block_is_refused() -> None:
    memory = KVMemory(_layout(), "cpu")
    for count in (0, 17):
        with pytest.raises(AssertionError, match="stays in its block"):
            memory.copy_blocks([BlockCopy(0, 30, 31, count)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_poison_is_nan_in_every_element_of_the_block_alone(layout: MemoryLayout) -> None:
    for group in layout.groups:
        memory = KVMemory(layout, "cpu")
        block = 3 * group.blocks_per_slab + group.blocks_per_slab - 1
        memory.poison(group.group_id, [block])
        for spec in group.layers:
            for part in _parts(memory, spec.layer).values():
                assert bool(part[3, group.blocks_per_slab - 1].isnan().all())
        begin = layout.address(group.group_id, block)
        memory.memory[begin : begin + group.block_bytes] = 0
        assert not bool(memory.memory.any())


def test_closed_memory_holds_nothing() -> None:
    memory = KVMemory(_layout(), "cpu")
    memory.close()
    assert memory.memory.numel() == 0
    assert memory.views == {}
