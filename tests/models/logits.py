"""Comparing a model's logits with those of transformers, over splits and mixes of a step."""

import random
from pathlib import Path

import torch
from torch import Tensor

from dalsegno.models.base import CausalLM
from dalsegno.models.registry import load_model
from tests.models.harness import ModelRunner
from tests.models.hugging_face import reference_logits


def random_prompts(vocab_size: int, lengths: tuple[int, ...]) -> list[list[int]]:
    """Return random prompts of these lengths."""
    source = random.Random(11)
    return [[source.randrange(vocab_size) for _ in range(length)] for length in lengths]


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Check logits within the tolerance of rule R1."""
    assert found.shape == expected.shape
    error = (found - expected).abs().max()
    assert error <= 1e-4 * (1 + expected.abs().max()), f"logits differ by {error}"


def run_whole(model: CausalLM, prompts: list[list[int]]) -> list[Tensor]:
    """All prompts in one step."""
    runner = ModelRunner(model, len(prompts), max(map(len, prompts)))
    hidden = runner.step(dict(enumerate(prompts)))
    return list(model.compute_logits(hidden).split([len(prompt) for prompt in prompts]))


def run_split(model: CausalLM, prompts: list[list[int]], most: int) -> list[Tensor]:
    """Every step takes 1 to `most` tokens of some of the requests, in changing order."""
    source = random.Random(3)
    runner = ModelRunner(model, len(prompts), max(map(len, prompts)), block_size=source.choice((4, 16)))
    done: list[list[Tensor]] = [[] for _ in prompts]
    while pending := [row for row, prompt in enumerate(prompts) if runner.starts[row] < len(prompt)]:
        rows = source.sample(pending, source.randint(1, len(pending)))
        step = {}
        for row in rows:
            start = runner.starts[row]
            step[row] = prompts[row][start : start + source.choice((1, source.randint(1, most)))]
        hidden = runner.step(step)
        parts = model.compute_logits(hidden).split([len(tokens) for tokens in step.values()])
        for row, part in zip(rows, parts, strict=True):
            done[row].append(part)
    return [torch.cat(parts) for parts in done]


def check_logits(path: Path, lengths: tuple[int, ...], most: int) -> None:
    """Check a checkpoint: all prompts in one step, and split over steps of at most `most` tokens."""
    model = load_model(path, torch.float32, "cpu")
    prompts = random_prompts(model.vocab_size, lengths)
    expected = reference_logits(path, prompts)
    for run in (run_whole(model, prompts), run_split(model, prompts, most)):
        for found, wanted in zip(run, expected, strict=True):
            assert_close(found, wanted)
