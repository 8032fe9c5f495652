"""Index tensors of the state group and the cut into tiles, against counting one by one."""

import random

import pytest
import torch

from dalsegno.ops import tiles
from dalsegno.ops.state_batch import StateBatch
from dalsegno.ops.views import RowStrides
from tests.ops.memory import offsets_of

SIZE = tiles.TILE_SIZE


def _random_batch(seed: int) -> tuple[StateBatch, list[int]]:
    rng = random.Random(seed)
    lengths = [rng.choice([1, 1, 2, SIZE - 1, SIZE, SIZE + 1, 5 * SIZE + 3]) for _ in range(rng.randint(1, 8))]
    blocks = iter(range(1, 1000))
    exports = [
        (row, count, next(blocks))
        for row, length in enumerate(lengths)
        for count in rng.sample(range(1, length + 1), min(length, rng.randint(0, 4)))
    ]
    rng.shuffle(exports)
    write = [next(blocks) for _ in lengths]
    return StateBatch.build(offsets_of(lengths), [rng.choice([0, w]) for w in write], write, exports), lengths


@pytest.mark.parametrize("seed", range(12))
def test_every_token_has_one_place_and_exports_end_tiles(seed: int) -> None:
    batch, lengths = _random_batch(seed)
    offsets = offsets_of(lengths)
    several = [row for row, length in enumerate(lengths) if length > 1]
    assert batch.single_rows.tolist() == [row for row, length in enumerate(lengths) if length == 1]
    grid = batch.tiles
    if grid is None:
        assert several == []
        return
    assert sorted(grid.rows.tolist()) == several
    assert grid.token_ids.tolist() == [t for row in several for t in range(offsets[row], offsets[row + 1])]
    assert grid.tokens.flatten()[grid.places].tolist() == grid.token_ids.tolist()
    paddings = [] if grid.paddings is None else grid.paddings.tolist()
    assert sorted(grid.places.tolist() + paddings) == list(range(grid.num_tiles * grid.size))
    done = dict.fromkeys(grid.rows.tolist(), 0)
    exported: set[int] = set()
    for i, (begin, end) in enumerate(zip(grid.round_start, grid.round_start[1:], strict=False)):
        for rank, tile in enumerate(range(begin, end)):
            row = int(grid.rows[rank])
            count = sum(1 for place in grid.places.tolist() if place // grid.size == tile)
            assert 0 < count <= SIZE
            assert int(grid.tokens[tile, 0]) == offsets[row] + done[row]
            done[row] += count
        pairs = grid.exports[i]
        for rank, number in zip(*(x.tolist() for x in pairs), strict=True) if pairs else []:
            assert batch.exports[number][:2] == (int(grid.rows[rank]), done[int(grid.rows[rank])])
            exported.add(number)
    assert done == {row: lengths[row] for row in several}
    assert exported == {n for n, (row, _, _) in enumerate(batch.exports) if lengths[row] > 1}


@pytest.mark.parametrize("seed", range(6))
def test_window_places_are_the_inputs_before_each_boundary(seed: int) -> None:
    batch, lengths = _random_batch(seed)
    width = 3
    # What the layout holds: (row, index), negative for inputs before the step.
    layout = [(row, i) for row, length in enumerate(lengths) for i in range(-width, length)]
    places = batch.window_places(width)
    kept = [layout[place] for place in places.kept.tolist()]
    boundaries = [*enumerate(lengths), *((row, count) for row, count, _ in batch.exports)]
    assert kept == [(row, i) for row, count in boundaries for i in range(count - width, count)]
    begins = list(range(len(layout) - width)) if places.outputs is None else places.outputs.tolist()
    tokens = [(row, i) for row, length in enumerate(lengths) for i in range(length)]
    assert [layout[begin : begin + width + 1] for begin in begins] == [
        [(row, j) for j in range(i - width, i + 1)] for row, i in tokens
    ]


def test_rows_follow_the_write_order() -> None:
    batch = StateBatch.build([0, 2, 3], [5, 0], [6, 3], [(1, 1, 9), (0, 1, 4)], blocks_per_slab=2)
    strides = RowStrides(slab=10, block=4, token=0)
    assert batch.read_rows(strides).tolist() == [24, 0]
    assert batch.write_rows(strides).tolist() == [30, 14, 44, 20]


@pytest.mark.parametrize(
    ("write", "exports", "message"),
    [
        ([0, 4], [], "null block"),
        ([3, 4], [(0, 1, 0)], "null block"),
        ([3, 3], [], "written once"),
        ([3, 4], [(0, 1, 4)], "written once"),
        ([3, 4], [(0, 3, 5)], "inside the step"),
        ([3, 4], [(0, 0, 5)], "inside the step"),
        ([3], [], "one read and one write block"),
    ],
)
def test_broken_blocks_are_refused(write: list[int], exports: list[tuple[int, int, int]], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        StateBatch.build([0, 2, 4], [0, 0], write, exports)


def test_steps_of_single_tokens_have_no_tiles() -> None:
    batch = StateBatch.build([0, 1, 2], [0, 3], [2, 3], [(1, 1, 4)])
    assert batch.tiles is None
    assert torch.equal(batch.single_export_rows, torch.tensor([1]))
