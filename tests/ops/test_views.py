"""Row views name the same bytes as the strided views."""

import pytest
import torch

from dalsegno.ops.views import PagedView, StateView
from tests.ops.memory import SlabMemory

# (slabs, blocks per slab, gap): one block per slab, several, rows that are no multiple of the strides, one slab.
CUTS = [(5, 1, 0), (4, 3, 0), (4, 3, 5), (1, 2, 1), (1, 1, 0), (3, 7, 64)]


@pytest.mark.parametrize(("num_slabs", "per_slab", "gap"), CUTS)
def test_every_slot_is_the_row_its_strides_name(num_slabs: int, per_slab: int, gap: int) -> None:
    memory = SlabMemory({"key": (4, 2, 3), "value": (4, 2, 5)}, num_slabs, per_slab, gap)
    memory.flat[:] = torch.arange(len(memory.flat))
    view = PagedView(memory.part("key"), memory.part("value"))
    ids = torch.arange(num_slabs * per_slab)
    for part, rows, strides in (
        (view.key, view.key_rows, view.key_strides),
        (view.value, view.value_rows, view.value_strides),
    ):
        first = strides.first_rows(ids, per_slab)
        index = first[:, None] + torch.arange(4) * strides.token
        assert torch.equal(rows[index].view(num_slabs, per_slab, 4, 2, -1), part)


@pytest.mark.parametrize(("num_slabs", "per_slab", "gap"), CUTS)
def test_every_state_is_the_row_its_strides_name(num_slabs: int, per_slab: int, gap: int) -> None:
    memory = SlabMemory({"conv": (5, 3), "recurrent": (2, 3, 4)}, num_slabs, per_slab, gap)
    memory.flat[:] = torch.arange(len(memory.flat))
    view = StateView({name: memory.part(name) for name in memory.shapes})
    for name, part in view.parts.items():
        index = view.strides[name].first_rows(torch.arange(num_slabs * per_slab), per_slab)
        assert torch.equal(view.rows[name][index].view(part.shape), part)


def test_a_written_row_is_one_slot_and_nothing_else() -> None:
    memory = SlabMemory({"key": (4, 2, 3), "value": (4, 2, 5)}, 4, 3, 5)
    memory.flat[:] = 0
    view = PagedView(memory.part("key"), memory.part("value"))
    row = view.key_strides.first_rows(torch.tensor([7]), 3) + 2 * view.key_strides.token
    view.key_rows[row] = torch.ones(1, 6)
    assert memory.flat.sum() == 6
    assert bool((memory.part("key")[2, 1, 2] == 1).all())


def test_the_null_block_is_row_zero() -> None:
    memory = SlabMemory({"key": (4, 2, 3), "value": (4, 2, 5)}, 4, 3, 5)
    view = PagedView(memory.part("key"), memory.part("value"))
    for strides in (view.key_strides, view.value_strides):
        assert strides.first_rows(torch.tensor([0]), 3).tolist() == [0]


def test_a_part_that_is_not_contiguous_inside_a_block_is_refused() -> None:
    turned = torch.zeros(3, 2, 4, 2, 3).transpose(2, 3)
    with pytest.raises(AssertionError, match="contiguous inside a block"):
        PagedView(turned, turned)
