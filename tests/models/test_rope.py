"""Rotary frequencies are those of transformers for every supported type, over odd settings."""

import random
from typing import Any

import pytest
import torch

from dalsegno.models.config_fields import ConfigFields
from dalsegno.models.rope import RotaryEmbedding, apply_rotary, read_rope_config

HEAD_DIM = 24


def _settings(rope_type: str, source: random.Random) -> dict[str, Any]:
    settings: dict[str, Any] = {"rope_type": rope_type, "rope_theta": source.choice((100.0, 10000.0, 1e6))}
    if rope_type != "default":
        settings["factor"] = source.choice((1.0, 2.5, 8.0))
    if rope_type in ("llama3", "yarn") and source.random() < 0.8:
        settings["original_max_position_embeddings"] = source.choice((64, 500, 4096))
    if rope_type == "llama3":
        settings.update(low_freq_factor=source.choice((1.0, 2.0)), high_freq_factor=source.choice((4.0, 16.0)))
    if rope_type == "yarn":
        optional: dict[str, Any] = {
            "attention_factor": 0.7,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
            "mscale": 0.8,
            "mscale_all_dim": 1.1,
            "truncate": False,
        }
        settings.update({name: value for name, value in optional.items() if source.random() < 0.5})
    return settings


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3", "yarn"])
def test_frequencies_match_transformers(rope_type: str) -> None:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

    source = random.Random(1)
    positions = torch.tensor([0, 1, 17, 1000, 32767])
    for _ in range(40):
        settings = _settings(rope_type, source) | {"partial_rotary_factor": source.choice((0.25, 0.5, 1.0))}
        theirs = Qwen3NextRotaryEmbedding(
            Qwen3NextConfig(head_dim=HEAD_DIM, max_position_embeddings=8192, rope_parameters=dict(settings))
        )
        fields = ConfigFields({"max_position_embeddings": 8192, "rope_parameters": settings})
        ours = RotaryEmbedding(read_rope_config(fields, HEAD_DIM, 0.25), torch.float32)
        torch.testing.assert_close(ours.frequencies, theirs.inv_freq, rtol=1e-6, atol=0, msg=str(settings))
        cosine, sine = ours(positions)
        their_cosine, their_sine = theirs(torch.zeros(1), positions[None])
        half = cosine.shape[-1]
        torch.testing.assert_close(cosine[:, 0], their_cosine[0, :, :half], rtol=0, atol=2e-2, msg=str(settings))
        torch.testing.assert_close(cosine[:3, 0], their_cosine[0, :3, :half], rtol=0, atol=2e-5, msg=str(settings))
        torch.testing.assert_close(sine[:3, 0], their_sine[0, :3, :half], rtol=0, atol=2e-5, msg=str(settings))


def test_rotation_keeps_distances_and_leaves_the_rest_alone() -> None:
    fields = ConfigFields({"partial_rotary_factor": 0.5})
    rotary = RotaryEmbedding(read_rope_config(fields, HEAD_DIM, 1.0), torch.float64)
    heads = torch.randn(2, 3, HEAD_DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(shift: int) -> torch.Tensor:
        rotated = apply_rotary(heads, rotary(torch.tensor([3 + shift, 10 + shift])))
        assert torch.equal(rotated[..., HEAD_DIM // 2 :], heads[..., HEAD_DIM // 2 :])
        return (rotated[0] * rotated[1]).sum(-1)

    torch.testing.assert_close(score(0), score(50), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(score(0), (heads[0] * heads[1]).sum(-1))
