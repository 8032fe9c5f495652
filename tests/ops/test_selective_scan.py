"""The selective scan against its reference: lengths, mixes, groups, blocks, exports, splits, extremes, poison."""

import pytest
import torch

from dalsegno.ops.batch import StateBatch
from dalsegno.ops.tiles import TILE_SIZE
from tests.ops.memory import NAN, SlabMemory, offsets_of
from tests.ops.state_steps import (
    SCAN_HEADS,
    SCAN_SHAPES,
    ScanInputs,
    check_against_reference,
    in_place,
    random_cuts,
    random_state_step,
    run_scan,
)

pytestmark = pytest.mark.usefixtures("either_form")

MIXES = [
    [1],
    [1, 1, 1],
    [2],
    [300],
    [1, TILE_SIZE + 1, 1, 2],
    [TILE_SIZE - 1, 1, 3 * TILE_SIZE, TILE_SIZE],
    [1, 2, 3, TILE_SIZE - 1, TILE_SIZE, TILE_SIZE + 1, 100],
]


def _memory(num_blocks: int, per_slab: int = 1) -> SlabMemory:
    return SlabMemory(SCAN_SHAPES, 1 + -(-num_blocks // per_slab), per_slab)


@pytest.mark.parametrize("per_slab", [1, 5])
@pytest.mark.parametrize("decay", [0.02, 2.0])
@pytest.mark.parametrize("lengths", MIXES, ids=str)
def test_mixed_steps_match_the_reference(lengths: list[int], decay: float, per_slab: int) -> None:
    for seed, groups in enumerate((1, 2, SCAN_HEADS)):
        memory, batch = random_state_step(lengths, per_slab, seed, SCAN_SHAPES)
        check_against_reference(ScanInputs.random(sum(lengths), seed, decay, groups), memory, batch)


def test_an_export_is_the_state_of_a_run_that_ended_there() -> None:
    length = 300
    inputs = ScanInputs.random(length, decay=0.05)
    memory = _memory(2 + 2 * length)
    memory.block("recurrent", 1).normal_(generator=torch.Generator().manual_seed(1))
    exports = [(0, count, 2 + count) for count in range(1, length + 1)]
    out = run_scan(inputs, memory, StateBatch.build([0, length], [1], [2], exports))
    for count in range(1, length + 1):
        ended = 2 + length + count
        alone = run_scan(inputs.part(0, count), memory, StateBatch.build([0, count], [1], [ended]))
        exported, expected = memory.block("recurrent", 2 + count), memory.block("recurrent", ended)
        torch.testing.assert_close(exported, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(out[:count], alone, atol=1e-5, rtol=1e-5)
    assert torch.equal(memory.block("recurrent", 2), memory.block("recurrent", 2 + length))


@pytest.mark.parametrize("seed", range(6))
def test_any_split_over_steps_gives_the_same(seed: int) -> None:
    length = 170
    inputs = ScanInputs.random(length, seed, decay=0.05)
    memory = _memory(2)
    whole = run_scan(inputs, memory, in_place(memory, length, 1, fresh=True))
    parts = [
        run_scan(inputs.part(begin, end), memory, in_place(memory, end - begin, 2, fresh=begin == 0))
        for begin, end in random_cuts(length, seed)
    ]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(memory.block("recurrent", 2), memory.block("recurrent", 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 50])
def test_a_block_that_is_only_read_stays_as_it_is(length: int) -> None:
    memory = _memory(3)
    memory.block("recurrent", 1).normal_()
    before = memory.block("recurrent", 1).clone()
    run_scan(ScanInputs.random(length), memory, StateBatch.build([0, length], [1], [2], [(0, 1, 3)]))
    assert torch.equal(memory.block("recurrent", 1), before)
    assert bool((memory.flat[: memory.slab_stride] == 0).all())


@pytest.mark.parametrize("lengths", [[1, 1], [40, 40], [40, 1]], ids=str)
def test_every_read_comes_before_any_write(lengths: list[int]) -> None:
    # Each row writes the block the other one reads.
    inputs = ScanInputs.random(sum(lengths))
    memory = _memory(2)
    for block in (1, 2):
        memory.block("recurrent", block).normal_(generator=torch.Generator().manual_seed(block))
    check_against_reference(inputs, memory, StateBatch.build(offsets_of(lengths), [1, 2], [2, 1]))


@pytest.mark.parametrize("length", [1, TILE_SIZE + 5])
@pytest.mark.parametrize("decay", [0.0, 1e-7, 5.0, 100.0, 1e4, torch.inf])
def test_decays_of_any_strength_match_the_reference(decay: float, length: int) -> None:
    inputs = ScanInputs.random(length)
    inputs.rate = torch.full_like(inputs.rate, -decay)
    memory = _memory(2)
    memory.block("recurrent", 1).normal_()
    check_against_reference(inputs, memory, StateBatch.build([0, length], [1], [2]))


def test_weak_decays_behind_a_very_strong_one_keep_their_precision() -> None:
    length = 3 * TILE_SIZE
    inputs = ScanInputs.random(length, decay=0.02)
    # A step this long is a decay this strong; what it adds is kept in proportion.
    inputs.step[3::TILE_SIZE] = 1e7
    inputs.value[3::TILE_SIZE] *= 1e-7
    memory = _memory(2)
    out = check_against_reference(inputs, memory, StateBatch.build([0, length], [0], [1]))
    # Read as it decays, in float64: the tile's sums of logarithms are large, the differences that matter are small.
    state = torch.zeros(*SCAN_SHAPES["recurrent"], dtype=torch.float64)
    value, step, rate, key, query, skip = (x.double() for x in inputs.tensors())
    repeats = SCAN_HEADS // key.shape[1]
    for t in range(length):
        state = state * (rate * step[t]).exp()[:, None, None]
        keys, queries = (x[t].repeat_interleave(repeats, dim=0) for x in (key, query))
        state = state + (step[t][:, None] * value[t])[:, :, None] * keys[:, None]
        expected = torch.einsum("hpn,hn->hp", state, queries) + skip[:, None] * value[t]
        torch.testing.assert_close(out[t], expected.float(), atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("broken", range(4))
def test_a_request_with_nan_inputs_spoils_no_other(broken: int) -> None:
    lengths = [1, 40, TILE_SIZE + 3, 1]
    offsets = offsets_of(lengths)
    inputs = ScanInputs.random(sum(lengths))
    write = [1, 2, 3, 4]
    good, spoiled = _memory(4), _memory(4)
    batch = StateBatch.build(offsets, [0] * 4, write)
    expected = run_scan(inputs, good, batch)
    for x in (inputs.value, inputs.step, inputs.key, inputs.query):
        x[offsets[broken] : offsets[broken + 1]] = NAN
    out = run_scan(inputs, spoiled, batch)
    for row in set(range(4)) - {broken}:
        tokens = slice(offsets[row], offsets[row + 1])
        torch.testing.assert_close(out[tokens], expected[tokens], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(
            spoiled.block("recurrent", write[row]), good.block("recurrent", write[row]), atol=1e-6, rtol=1e-6
        )


def test_inputs_of_low_precision_keep_a_float32_state() -> None:
    lengths = [1, 70]
    inputs = ScanInputs(*(x.bfloat16() for x in ScanInputs.random(sum(lengths)).tensors()))
    exact = ScanInputs(*(x.float() for x in inputs.tensors()))
    batch = StateBatch.build(offsets_of(lengths), [0, 0], [1, 2])
    low, full = _memory(2), _memory(2)
    out = run_scan(inputs, low, batch)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, run_scan(exact, full, batch).bfloat16())
    assert torch.equal(low.block("recurrent", 2), full.block("recurrent", 2))


def test_states_of_low_precision_are_rounded_once_per_step() -> None:
    batch = StateBatch.build([0, 1, 41], [1, 2], [1, 2])
    inputs = ScanInputs.random(41)
    low, full = SlabMemory(SCAN_SHAPES, 3, 1, dtype=torch.bfloat16), _memory(2)
    for block in (1, 2):
        low.block("recurrent", block).normal_()
        full.block("recurrent", block).copy_(low.block("recurrent", block))
    out = run_scan(inputs, low, batch)
    torch.testing.assert_close(out, run_scan(inputs, full, batch))
    assert torch.equal(low.block("recurrent", 2), full.block("recurrent", 2).bfloat16())
