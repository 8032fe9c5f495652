"""What a checkpoint names fills every parameter of every family exactly once, in either spelling."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from dalsegno.models.registry import build_model
from dalsegno.models.tiny.kinds import TINY_KINDS, tiny_config
from dalsegno.models.weights import WeightTarget

SMALL = {"vocab_size": 8}
BIASES = ("attention_bias", "conv_bias", "mamba_proj_bias", "mlp_bias", "projectors_bias", "use_bias")


def _biased(kind: str) -> dict[str, Any]:
    config = tiny_config(kind) | SMALL
    refused = {"attention_bias"} if kind == "nemotron-h" else set()
    return config | {name: True for name in BIASES if name in config and name not in refused}


def _all_filled_once(model: torch.nn.Module, targets: Iterable[WeightTarget]) -> bool:
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.zero_()
    for target in targets:
        target.destination.add_(1)
    return all(bool((parameter == 1).all()) for parameter in parameters)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", TINY_KINDS)
def test_targets_cover_every_parameter_exactly_once(kind: str, biased: bool) -> None:
    model = build_model(_biased(kind) if biased else tiny_config(kind) | SMALL, torch.float32, "cpu")
    assert _all_filled_once(model, model.weight_targets().values())


@pytest.mark.parametrize("kind", ["qwen3-next", "qwen3-5-moe"])
def test_a_tensor_in_one_piece_fills_what_its_parts_fill(kind: str) -> None:
    model = build_model(tiny_config(kind) | SMALL, torch.float32, "cpu")
    targets, fused = model.weight_targets(), model.fused_tensors()
    assert len(fused) == 2 * len(model.cache_specs())
    for name, tensor in fused.items():
        whole = dict(targets)
        for part in tensor.parts:
            del whole[part]
        assert _all_filled_once(model, [*whole.values(), tensor.target]), name
