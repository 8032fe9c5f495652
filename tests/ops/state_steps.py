"""Random steps of the state ops, with poisoned memory and a reference to compare with."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dalsegno.ops import reference
from dalsegno.ops.batch import StateBatch
from dalsegno.ops.causal_conv import causal_conv
from dalsegno.ops.gated_delta import gated_delta_rule
from dalsegno.ops.selective_scan import selective_scan
from tests.ops.memory import BlockDealer, SlabMemory, offsets_of, same_memory, state_cache

HEADS, KEY_DIM, VALUE_DIM, CHANNELS, KERNEL = 3, 8, 5, 7, 4
SHAPES = {"conv": (CHANNELS, KERNEL - 1), "recurrent": (HEADS, KEY_DIM, VALUE_DIM)}
SCAN_HEADS, HEAD_DIM, STATE_DIM = 6, 5, 8
SCAN_SHAPES = {"recurrent": (SCAN_HEADS, HEAD_DIM, STATE_DIM)}


@dataclass
class DeltaInputs:
    """Inputs of the gated delta rule; `part(begin, end)` is a run of tokens."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor

    @staticmethod
    def random(num_tokens: int, seed: int = 0, decay: float = 0.1, key_heads: int = HEADS) -> "DeltaInputs":
        """Draw inputs as a model makes them; `decay` scales the logarithms of the decays."""
        g = torch.Generator().manual_seed(seed)
        shape = (num_tokens, HEADS)
        return DeltaInputs(
            torch.randn(num_tokens, key_heads, KEY_DIM, generator=g),
            torch.randn(num_tokens, key_heads, KEY_DIM, generator=g),
            torch.randn(*shape, VALUE_DIM, generator=g),
            -decay * torch.rand(shape, generator=g),
            torch.rand(shape, generator=g),
        )

    def part(self, begin: int, end: int) -> "DeltaInputs":
        """Return tokens `[begin, end)`."""
        return DeltaInputs(*(x[begin:end] for x in self.tensors()))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the five, in the op's order."""
        return self.query, self.key, self.value, self.log_decay, self.beta

    @staticmethod
    def joined(parts: Sequence["DeltaInputs"]) -> "DeltaInputs":
        """Return several requests' tokens one after the other."""
        return DeltaInputs(*(torch.cat(xs) for xs in zip(*(part.tensors() for part in parts), strict=True)))


@dataclass
class ConvInputs:
    """Inputs of the causal convolution."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    activation: str | None

    @staticmethod
    def random(num_tokens: int, seed: int = 0, *, bias: bool = True, activation: str | None = "silu") -> "ConvInputs":
        """Draw inputs and weights; equal seeds give equal weights."""
        g = torch.Generator().manual_seed(seed)
        weight, offset = torch.randn(CHANNELS, KERNEL, generator=g), torch.randn(CHANNELS, generator=g)
        x = torch.randn(num_tokens, CHANNELS, generator=g)
        return ConvInputs(x, weight, offset if bias else None, activation)

    def part(self, begin: int, end: int) -> "ConvInputs":
        """Return tokens `[begin, end)`."""
        return ConvInputs(self.x[begin:end], self.weight, self.bias, self.activation)


@dataclass
class ScanInputs:
    """Inputs of the selective scan; `part(begin, end)` is a run of tokens."""

    value: Tensor
    step: Tensor
    rate: Tensor
    key: Tensor
    query: Tensor
    skip: Tensor

    @staticmethod
    def random(num_tokens: int, seed: int = 0, decay: float = 0.1, groups: int = 2) -> "ScanInputs":
        """Draw inputs; equal seeds give equal rates and skips. `decay` scales the logarithms of the decays."""
        g = torch.Generator().manual_seed(seed)
        rate, skip = -decay * torch.rand(SCAN_HEADS, generator=g), torch.randn(SCAN_HEADS, generator=g)
        return ScanInputs(
            torch.randn(num_tokens, SCAN_HEADS, HEAD_DIM, generator=g),
            torch.rand(num_tokens, SCAN_HEADS, generator=g),
            rate,
            torch.randn(num_tokens, groups, STATE_DIM, generator=g) * STATE_DIM**-0.5,
            torch.randn(num_tokens, groups, STATE_DIM, generator=g) * STATE_DIM**-0.5,
            skip,
        )

    def part(self, begin: int, end: int) -> "ScanInputs":
        """Return tokens `[begin, end)`."""
        value, step, key, query = (x[begin:end] for x in (self.value, self.step, self.key, self.query))
        return ScanInputs(value, step, self.rate, key, query, self.skip)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the six, in the op's order."""
        return self.value, self.step, self.rate, self.key, self.query, self.skip


def run_scan(inputs: ScanInputs, memory: SlabMemory, batch: StateBatch) -> Tensor:
    """Run the fast selective scan."""
    return selective_scan(*inputs.tensors(), state_cache(memory, batch))


def run_delta(inputs: DeltaInputs, memory: SlabMemory, batch: StateBatch) -> Tensor:
    """Run the fast gated delta rule."""
    return gated_delta_rule(*inputs.tensors(), state_cache(memory, batch))


def run_conv(inputs: ConvInputs, memory: SlabMemory, batch: StateBatch) -> Tensor:
    """Run the fast convolution."""
    cache = state_cache(memory, batch)
    return causal_conv(inputs.x, inputs.weight, inputs.bias, cache, activation=inputs.activation)


def check_against_reference(
    inputs: DeltaInputs | ConvInputs | ScanInputs, memory: SlabMemory, batch: StateBatch
) -> Tensor:
    """Run op and reference on equal memory; compare outputs and every byte; return the op's output."""
    other = memory.clone()
    if isinstance(inputs, DeltaInputs):
        out = run_delta(inputs, memory, batch)
        expected = reference.gated_delta_rule(*inputs.tensors(), state_cache(other, batch))
    elif isinstance(inputs, ScanInputs):
        out = run_scan(inputs, memory, batch)
        expected = reference.selective_scan(*inputs.tensors(), state_cache(other, batch))
    else:
        out = run_conv(inputs, memory, batch)
        cache = state_cache(other, batch)
        expected = reference.causal_conv(inputs.x, inputs.weight, inputs.bias, cache, activation=inputs.activation)
    assert bool(expected.isfinite().all()), "the reference itself read a poisoned byte"
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    same_memory(memory, other)
    return out


def random_state_step(
    lengths: Sequence[int], per_slab: int, seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> tuple[SlabMemory, StateBatch]:
    """Return memory and a batch: null and given read blocks, in place or not, up to four exports per request.

    Some rows read the block that another row writes.
    """
    rng = random.Random(seed)
    memory = SlabMemory(shapes, 1 + -(-7 * len(lengths) // per_slab), per_slab, gap=rng.choice([0, 3]))
    dealer = BlockDealer(memory, seed)
    write = dealer.take(len(lengths))
    read = []
    for row, block in enumerate(write):
        read.append(rng.choice([0, block, *dealer.take(), rng.choice(write)]))
        for name in shapes if read[row] else ():
            memory.block(name, read[row]).normal_(generator=torch.Generator().manual_seed(seed + row))
    exports = [
        (row, count, dealer.take()[0])
        for row, length in enumerate(lengths)
        for count in rng.sample(range(1, length + 1), min(length, rng.randint(0, 4)))
    ]
    return memory, StateBatch.build(offsets_of(lengths), read, write, exports, per_slab)


def seed_blocks(memory: SlabMemory, block_ids: Iterable[int]) -> None:
    """Give blocks the states of requests that have computed something, each its own."""
    for block in block_ids:
        for name in memory.shapes:
            memory.block(name, block).normal_(generator=torch.Generator().manual_seed(block))


def in_place(memory: SlabMemory, num_tokens: int, block: int, *, fresh: bool) -> StateBatch:
    """Return the batch of one request that goes on in `block`, or starts from the null block."""
    return StateBatch.build([0, num_tokens], [0 if fresh else block], [block], (), memory.blocks_per_slab)


def random_cuts(length: int, seed: int) -> list[tuple[int, int]]:
    """Cut `[0, length)` at random, single tokens among the pieces."""
    rng = random.Random(seed)
    ends = sorted({*rng.sample(range(1, length), min(length - 1, rng.randint(1, 8))), length, 1, length - 1} - {0})
    return list(zip([0, *ends], ends, strict=False))
