"""Models give the logits of transformers, however a prompt is split over steps and whoever shares a step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dalsegno.models.registry import load_model
from dalsegno.models.tiny import TINY_KINDS
from tests.models.conftest import FolderOf
from tests.models.hugging_face import reference_logits, write_random_checkpoint
from tests.models.logits import assert_close, check_logits, random_prompts, run_whole

YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied, biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama, one kv head per head": ("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-2}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 100.0}}),
    "qwen3, tied, yarn": ("qwen3", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3, windows by max_window_layers": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "attention_bias": True},
    ),
    "qwen3-next, all experts layers": ("qwen3-next", {}),
    "qwen3-next, biases, raw top weights": ("qwen3-next", {"attention_bias": True, "norm_topk_prob": False}),
    "qwen3-next, some dense layers": ("qwen3-next", {"mlp_only_layers": [0, 3], "decoder_sparse_step": 2}),
    "qwen3-next, no experts": ("qwen3-next", {"num_experts": 0}),
    "qwen3-next, other layers, tied": (
        "qwen3-next",
        {
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "linear_conv_kernel_dim": 3,
            "linear_num_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
            "tie_word_embeddings": True,
        },
    ),
}


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_tiny_models_match_transformers_in_any_split(kind: str, tiny_folder: FolderOf) -> None:
    check_logits(tiny_folder(kind), lengths=(1, 67, 150), most=70)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_variant_of_a_config_matches_transformers(variant: str, tmp_path: Path) -> None:
    family, fields = VARIANTS[variant]
    write_random_checkpoint(family, tmp_path, **fields)
    check_logits(tmp_path, lengths=(3, 40), most=20)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-next"])
def test_sharded_checkpoint_loads_as_the_single_file(family: str, tmp_path: Path) -> None:
    write_random_checkpoint(family, tmp_path / "one")
    write_random_checkpoint(family, tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    prompts = random_prompts(120, (20,))
    one, many = (run_whole(load_model(tmp_path / name, torch.float32, "cpu"), prompts)[0] for name in ("one", "many"))
    assert torch.equal(one, many)


def _as_old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Spell rotary settings, dtype and layer types as configs did before transformers 5."""
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = None if rope["type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype", "float32")
    if config["model_type"] == "qwen3_next":
        config.pop("layer_types")
        config["full_attention_interval"] = 2
    return config


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"rope_parameters": LLAMA3}),
        ("qwen3", {"rope_parameters": YARN}),
        (
            "qwen3-next",
            {
                "layer_types": ["linear_attention", "full_attention"] * 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 77.0, "partial_rotary_factor": 0.5},
            },
        ),
    ],
)
def test_old_and_new_spelling_of_a_config_are_the_same_model(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    write_random_checkpoint(family, tmp_path, **fields)
    prompts = random_prompts(120, (30,))
    new = run_whole(load_model(tmp_path, torch.float32, "cpu"), prompts)[0]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(_as_old_spelling(json.loads(file.read_text()))))
    old = run_whole(load_model(tmp_path, torch.float32, "cpu"), prompts)[0]
    assert torch.equal(new, old)
    assert_close(old, reference_logits(tmp_path, prompts)[0])


@pytest.mark.parametrize("family", ["llama", "qwen3-next"])
def test_bfloat16_strays_from_float32_no_further_than_in_transformers(family: str, tmp_path: Path) -> None:
    write_random_checkpoint(family, tmp_path)
    prompts = random_prompts(120, (50,))
    exact = reference_logits(tmp_path, prompts)[0]
    theirs = (reference_logits(tmp_path, prompts, torch.bfloat16)[0] - exact).norm()
    model = load_model(tmp_path, torch.bfloat16, "cpu")
    ours = (run_whole(model, prompts)[0] - exact).norm()
    assert 0 < ours <= 1.5 * theirs
    kept = {part.name: part.dtype for spec in model.cache_specs() for part in spec.parts}
    assert kept["key"] == kept["value"] == kept.get("conv", "bfloat16") == "bfloat16"
    assert kept.get("recurrent", "float32") == "float32"
