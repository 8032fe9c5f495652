"""How memory is cut: nothing overlaps, everything is aligned, too little memory is refused by name."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.config import CacheConfig
from dalsegno.errors import OptionError
from dalsegno.kv.layout import MemoryLayout, plan_layout
from dalsegno.testing.builders import layer_specs, make_cut
from dalsegno.types import CachePart, GroupKind, LayerCacheSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "uint8": 1}


@st.composite
def layouts(draw: st.DrawFn) -> MemoryLayout:
    """Layers of any kinds, with odd shapes and mixed dtypes."""
    block_size = draw(st.sampled_from([1, 3, 16, 64]))
    specs = []
    for layer in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(list(GroupKind)))
        parts = tuple(
            CachePart(
                f"part {i}",
                tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))),
                draw(st.sampled_from(list(DTYPE_BYTES))),
            )
            for i in range(draw(st.integers(1, 3)))
        )
        specs.append(LayerCacheSpec(layer, kind, parts, 10 if kind is GroupKind.WINDOW else None))
    config = CacheConfig(block_size=block_size, hash_block_size=1, decode_checkpoint_interval=0)
    return plan_layout(specs, config, num_slabs=draw(st.integers(2, 6)))


@given(layouts())
def test_no_two_parts_of_a_block_overlap_and_all_are_aligned(layout: MemoryLayout) -> None:
    for group in layout.groups:
        tokens = 1 if group.is_state else group.block_size
        spans = []
        for layer, offsets in zip(group.layers, group.part_offsets, strict=True):
            for part, offset in zip(layer.parts, offsets, strict=True):
                assert offset % 64 == 0
                size = tokens * DTYPE_BYTES[part.dtype]
                for length in part.shape:
                    size *= length
                spans.append((offset, offset + size))
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(spans)))
        assert max(end for _, end in spans) <= group.block_bytes
        assert group.block_bytes % 256 == 0


@given(layouts())
def test_no_two_blocks_of_a_slab_overlap_and_none_leaves_its_slab(layout: MemoryLayout) -> None:
    for group in layout.groups:
        k = group.blocks_per_slab
        assert k >= 1
        for slab in range(layout.num_slabs):
            starts = [layout.address(group.group_id, block) for block in range(slab * k, (slab + 1) * k)]
            assert starts == list(range(starts[0], starts[0] + k * group.block_bytes, group.block_bytes))
            assert starts[0] == slab * layout.slab_bytes
            assert starts[-1] + group.block_bytes <= (slab + 1) * layout.slab_bytes
            assert starts[0] % 64 == 0
    assert layout.total_bytes == layout.num_slabs * layout.slab_bytes


@given(layouts())
def test_groups_are_attention_window_state_and_hold_every_layer_once(layout: MemoryLayout) -> None:
    kinds = [group.kind for group in layout.groups]
    assert kinds == [kind for kind in GroupKind if kind in kinds]
    assert [group.group_id for group in layout.groups] == list(range(len(kinds)))
    layers = [layer.layer for group in layout.groups for layer in group.layers]
    assert sorted(layers) == list(range(len(layers)))
    for group in layout.groups:
        assert all(layer.kind is group.kind for layer in group.layers)


@given(layouts())
def test_attention_is_addressed_by_one_multiplication(layout: MemoryLayout) -> None:
    group = layout.groups[0]
    if group.kind is GroupKind.ATTENTION:
        for block in range(layout.num_slabs * group.blocks_per_slab):
            assert layout.address(0, block) == block * group.block_bytes


def test_the_null_block_of_every_group_is_the_start_of_memory() -> None:
    layout = make_cut("aws", [4, 2, 1])
    assert [layout.address(group.group_id, 0) for group in layout.groups] == [0, 0, 0]


def test_slabs_are_as_many_as_the_memory_holds() -> None:
    layout = plan_layout(layer_specs("as"), CacheConfig(), memory_bytes=100_000)
    assert layout.total_bytes <= 100_000 < layout.total_bytes + layout.slab_bytes
    assert layout.with_slabs(3).num_slabs == 3


@pytest.mark.parametrize("memory_bytes", [0, 1, 256, 2047])
def test_memory_for_no_block_at_all_is_refused_with_what_is_needed(memory_bytes: int) -> None:
    with pytest.raises(OptionError, match=rf"kv_cache_memory_bytes={memory_bytes} .* at least 2048 bytes"):
        plan_layout(layer_specs("as"), CacheConfig(), memory_bytes=memory_bytes)


def test_a_model_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(OptionError, match="no layer that keeps anything"):
        plan_layout([], CacheConfig(), num_slabs=4)
