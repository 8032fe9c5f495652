"""The gated delta rule against its reference: lengths, mixes, blocks, exports, splits, extremes, poison."""

import pytest
import torch

from dalsegno.ops.batch import StateBatch
from dalsegno.ops.tiles import TILE_SIZE
from tests.ops.memory import NAN, SlabMemory, offsets_of
from tests.ops.state_steps import (
    HEADS,
    KEY_DIM,
    SHAPES,
    DeltaInputs,
    check_against_reference,
    in_place,
    random_cuts,
    random_state_step,
    run_delta,
)

pytestmark = pytest.mark.usefixtures("either_form")

ODD_LENGTHS = [1, 2, 3, TILE_SIZE - 1, TILE_SIZE, TILE_SIZE + 1, 3 * TILE_SIZE, 150]
MIXES = [
    [1],
    [1, 1, 1],
    [2],
    [300],
    [1, TILE_SIZE + 1, 1, 2],
    [TILE_SIZE - 1, 1, 5 * TILE_SIZE, TILE_SIZE],
    [100, 1, 100],
    ODD_LENGTHS,
]


def _memory(num_blocks: int, per_slab: int = 1) -> SlabMemory:
    return SlabMemory(SHAPES, 1 + -(-num_blocks // per_slab), per_slab)


@pytest.mark.parametrize("per_slab", [1, 5])
@pytest.mark.parametrize("decay", [0.02, 2.0])
@pytest.mark.parametrize("lengths", MIXES, ids=str)
def test_mixed_steps_match_the_reference(lengths: list[int], decay: float, per_slab: int) -> None:
    for seed, key_heads in enumerate((HEADS, 1, HEADS)):
        memory, batch = random_state_step(lengths, per_slab, seed)
        check_against_reference(DeltaInputs.random(sum(lengths), seed, decay, key_heads), memory, batch)


def test_an_export_is_the_state_of_a_run_that_ended_there() -> None:
    length = 300
    inputs = DeltaInputs.random(length, decay=0.05)
    memory = _memory(2 + 2 * length)
    memory.block("recurrent", 1).normal_(generator=torch.Generator().manual_seed(1))
    exports = [(0, count, 2 + count) for count in range(1, length + 1)]
    out = run_delta(inputs, memory, StateBatch.build([0, length], [1], [2], exports))
    for count in range(1, length + 1):
        ended = 2 + length + count
        alone = run_delta(inputs.part(0, count), memory, StateBatch.build([0, count], [1], [ended]))
        exported, expected = memory.block("recurrent", 2 + count), memory.block("recurrent", ended)
        torch.testing.assert_close(exported, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(out[:count], alone, atol=1e-5, rtol=1e-5)
    assert torch.equal(memory.block("recurrent", 2), memory.block("recurrent", 2 + length))


@pytest.mark.parametrize("seed", range(6))
def test_any_split_over_steps_gives_the_same(seed: int) -> None:
    length = 170
    inputs = DeltaInputs.random(length, seed, decay=0.05)
    memory = _memory(2)
    whole = run_delta(inputs, memory, in_place(memory, length, 1, fresh=True))
    parts = [
        run_delta(inputs.part(begin, end), memory, in_place(memory, end - begin, 2, fresh=begin == 0))
        for begin, end in random_cuts(length, seed)
    ]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(memory.block("recurrent", 2), memory.block("recurrent", 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 50])
def test_a_block_that_is_only_read_stays_as_it_is(length: int) -> None:
    memory = _memory(3)
    memory.block("recurrent", 1).normal_()
    before = memory.block("recurrent", 1).clone()
    run_delta(DeltaInputs.random(length), memory, StateBatch.build([0, length], [1], [2], [(0, 1, 3)]))
    assert torch.equal(memory.block("recurrent", 1), before)
    assert bool((memory.flat[: memory.slab_stride] == 0).all())


@pytest.mark.parametrize("lengths", [[1, 1], [40, 40], [40, 1]], ids=str)
def test_every_read_comes_before_any_write(lengths: list[int]) -> None:
    # Each row writes the block the other one reads.
    inputs = DeltaInputs.random(sum(lengths))
    memory = _memory(2)
    for block in (1, 2):
        memory.block("recurrent", block).normal_(generator=torch.Generator().manual_seed(block))
    check_against_reference(inputs, memory, StateBatch.build(offsets_of(lengths), [1, 2], [2, 1]))


@pytest.mark.parametrize("length", [1, TILE_SIZE + 5])
@pytest.mark.parametrize("decay", [0.0, 1e-7, 5.0, 100.0, 1e4, torch.inf])
def test_decays_of_any_strength_match_the_reference(decay: float, length: int) -> None:
    inputs = DeltaInputs.random(length)
    inputs.log_decay = torch.full_like(inputs.log_decay, -decay)
    memory = _memory(2)
    memory.block("recurrent", 1).normal_()
    check_against_reference(inputs, memory, StateBatch.build([0, length], [1], [2]))


def test_weak_decays_behind_a_very_strong_one_keep_their_precision() -> None:
    length = 3 * TILE_SIZE
    inputs = DeltaInputs.random(length, decay=0.02)
    inputs.log_decay[3::TILE_SIZE] = -1e5
    inputs.log_decay[7] = -50.0
    memory = _memory(2)
    out = check_against_reference(inputs, memory, StateBatch.build([0, length], [0], [1]))
    # Read as it decays, in float64: the tile's sums of logarithms are large, the differences that matter are small.
    state = torch.zeros(HEADS, *SHAPES["recurrent"][1:], dtype=torch.float64)
    query, key, value, log_decay, beta = (x.double() for x in inputs.tensors())
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query /= KEY_DIM**0.5
    for t in range(length):
        state = state * log_decay[t].exp()[:, None, None]
        delta = beta[t][:, None] * (value[t] - torch.einsum("hk,hkv->hv", key[t], state))
        state = state + key[t][:, :, None] * delta[:, None]
        expected = torch.einsum("hk,hkv->hv", query[t], state).float()
        torch.testing.assert_close(out[t], expected, atol=2e-6, rtol=2e-6)


def test_equal_keys_that_each_replace_the_state_stay_exact() -> None:
    length = 4 * TILE_SIZE
    inputs = DeltaInputs.random(length, decay=0.0)
    inputs.key[:] = inputs.key[0]
    inputs.beta[:] = 1.0
    memory = _memory(1)
    check_against_reference(inputs, memory, StateBatch.build([0, length], [0], [1]))


@pytest.mark.parametrize("broken", range(4))
def test_a_request_with_nan_inputs_spoils_no_other(broken: int) -> None:
    lengths = [1, 40, TILE_SIZE + 3, 1]
    offsets = offsets_of(lengths)
    inputs = DeltaInputs.random(sum(lengths))
    write = [1, 2, 3, 4]
    good, spoiled = _memory(4), _memory(4)
    batch = StateBatch.build(offsets, [0] * 4, write)
    expected = run_delta(inputs, good, batch)
    for x in inputs.tensors():
        x[offsets[broken] : offsets[broken + 1]] = NAN
    out = run_delta(inputs, spoiled, batch)
    for row in set(range(4)) - {broken}:
        tokens = slice(offsets[row], offsets[row + 1])
        torch.testing.assert_close(out[tokens], expected[tokens], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(
            spoiled.block("recurrent", write[row]), good.block("recurrent", write[row]), atol=1e-6, rtol=1e-6
        )


def test_inputs_of_low_precision_keep_a_float32_state() -> None:
    lengths = [1, 70]
    inputs = DeltaInputs(*(x.bfloat16() for x in DeltaInputs.random(sum(lengths)).tensors()))
    exact = DeltaInputs(*(x.float() for x in inputs.tensors()))
    batch = StateBatch.build(offsets_of(lengths), [0, 0], [1, 2])
    low, full = _memory(2), _memory(2)
    out = run_delta(inputs, low, batch)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, run_delta(exact, full, batch).bfloat16())
    assert torch.equal(low.block("recurrent", 2), full.block("recurrent", 2))


def test_states_of_low_precision_are_rounded_once_per_step() -> None:
    batch = StateBatch.build([0, 1, 41], [1, 2], [1, 2])
    inputs = DeltaInputs.random(41)
    low, full = SlabMemory(SHAPES, 3, 1, dtype=torch.bfloat16), _memory(2)
    for block in (1, 2):
        low.block("recurrent", block).normal_()
        full.block("recurrent", block).copy_(low.block("recurrent", block))
    out = run_delta(inputs, low, batch)
    torch.testing.assert_close(out, run_delta(inputs, full, batch))
    assert torch.equal(low.block("recurrent", 2), full.block("recurrent", 2).bfloat16())
