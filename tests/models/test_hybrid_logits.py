"""Hybrid families give the logits of transformers in every variant of their config, old and new spelling."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dalsegno.errors import CheckpointError
from dalsegno.models.checkpoint import read_end_token_ids
from dalsegno.models.registry import load_model, read_dtype
from tests.models.broken import edit_tensors
from tests.models.hugging_face import reference_logits, write_multimodal_checkpoint, write_random_checkpoint
from tests.models.logits import assert_close, check_logits, random_prompts, run_whole

MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
NEMOTRON_MOE = ["linear_attention", "moe", "full_attention", "moe"]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite, dense": ("granite-hybrid", {"attention_bias": True, "mamba_proj_bias": True}),
    "granite, dense, tied, rope": (
        "granite-hybrid",
        {"position_embedding_type": "rope", "tie_word_embeddings": True, "mamba_conv_bias": False},
    ),
    "granite, experts, multipliers": (
        "granite-hybrid",
        MOE
        | {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.5,
            "residual_multiplier": 0.3,
        },
    ),
    "granite, state layers only": (
        "granite-hybrid",
        {"layer_types": None, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_conv": 3},
    ),
    "granite, limited steps": ("granite-hybrid", {"time_step_limit": [0.3, 0.8]}),
    "bamba": ("bamba", {}),
    "bamba, tied, biases": ("bamba", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "bamba, state layers only": ("bamba", {"attn_layer_indices": None}),
    "falcon-h1, all multipliers": (
        "falcon-h1",
        {
            "attention_in_multiplier": 0.8,
            "attention_out_multiplier": 1.2,
            "embedding_multiplier": 2.0,
            "key_multiplier": 0.7,
            "lm_head_multiplier": 0.4,
            "mlp_multipliers": [0.7, 1.3],
            "ssm_in_multiplier": 0.6,
            "ssm_multipliers": [0.5, 1.2, 0.7, 1.1, 0.9],
            "ssm_out_multiplier": 1.4,
        },
    ),
    "falcon-h1, norm then gate": ("falcon-h1", {"mamba_rms_norm": True, "projectors_bias": True}),
    "falcon-h1, gate then norm": ("falcon-h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "falcon-h1, inner size by mamba_expand": ("falcon-h1", {"mamba_d_ssm": None, "mlp_bias": True}),
    "lfm2": ("lfm2", {}),
    "lfm2, tied, biases, sizes as given": (
        "lfm2",
        {"block_auto_adjust_ff_dim": False, "conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": True},
    ),
    "lfm2, by full_attn_idxs": ("lfm2", {"layer_types": None, "full_attn_idxs": [1, 4]}),
    "nemotron-h, dense": ("nemotron-h", {}),
    "nemotron-h, biases": ("nemotron-h", {"mlp_bias": True, "use_bias": True}),
    "nemotron-h, experts": ("nemotron-h", {"layers_block_type": NEMOTRON_MOE, "norm_topk_prob": False}),
    "nemotron-h, groups of experts, latent": (
        "nemotron-h",
        {
            "layers_block_type": NEMOTRON_MOE,
            "moe_latent_size": 32,
            "n_group": 4,
            "routed_scaling_factor": 1.7,
            "topk_group": 2,
        },
    ),
    "qwen3-5": ("qwen3-5", {}),
    "qwen3-5, tied, biases": ("qwen3-5", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-5, experts": ("qwen3-5-moe", {"layer_types": ["full_attention", "linear_attention"] * 2}),
}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_variant_of_a_config_matches_transformers(variant: str, tmp_path: Path) -> None:
    family, fields = VARIANTS[variant]
    write_random_checkpoint(family, tmp_path, **fields)
    check_logits(tmp_path, lengths=(3, 40), most=20)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen3-5", "qwen3-5-moe"])
def test_the_text_part_of_a_multimodal_checkpoint_matches_transformers(
    family: str, tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_multimodal_checkpoint(family, tmp_path, tied=tied)
    with caplog.at_level("INFO", "dalsegno"):
        check_logits(tmp_path, lengths=(3, 40), most=20)
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == ["model.visual.*"]


def test_dtype_and_end_tokens_may_stand_in_the_text_config(tmp_path: Path) -> None:
    text = {"dtype": "bfloat16", "eos_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    assert (read_dtype(tmp_path), read_end_token_ids(tmp_path)) == (torch.bfloat16, frozenset({7}))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text, "dtype": "float16", "eos_token_id": [8]}))
    assert (read_dtype(tmp_path), read_end_token_ids(tmp_path)) == (torch.float16, frozenset({8}))


@pytest.mark.parametrize("family", ["qwen3-5-moe", "qwen3-next"])
def test_experts_load_one_by_one_and_in_one_piece(family: str, tmp_path: Path) -> None:
    write_random_checkpoint(family, tmp_path)
    prompts = random_prompts(120, (30,))
    single = run_whole(load_model(tmp_path, torch.float32, "cpu"), prompts)[0]
    edit_tensors(tmp_path, _fuse_experts)
    fused = run_whole(load_model(tmp_path, torch.float32, "cpu"), prompts)[0]
    assert torch.equal(single, fused)
    edit_tensors(tmp_path, lambda tensors: tensors.pop("model.layers.0.mlp.experts.down_proj"))
    with pytest.raises(CheckpointError, match=r"missing tensor 'model.layers.0.mlp.experts.0.down_proj.weight'"):
        load_model(tmp_path, torch.float32, "cpu")


def _fuse_experts(tensors: dict[str, Tensor]) -> None:
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        gates, ups, downs = (
            [tensors.pop(f"{prefix}.{index}.{name}_proj.weight") for index in range(6)]
            for name in ("gate", "up", "down")
        )
        pairs = zip(gates, ups, strict=True)
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors[f"{prefix}.down_proj"] = torch.stack(downs)


def test_tensors_that_are_not_used_are_named_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_random_checkpoint("qwen3-5", tmp_path)
    extra = {"mtp.fc.weight": torch.zeros(2), "mtp.norm.weight": torch.zeros(2), "model.visual.x": torch.zeros(1)}
    edit_tensors(tmp_path, lambda tensors: tensors.update(extra))
    with caplog.at_level("INFO", "dalsegno"):
        load_model(tmp_path, torch.float32, "cpu")
    assert [record.getMessage() for record in caplog.records] == ["3 tensors are not used: model.visual.*, mtp.*"]


def _old_mamba_names(config: dict[str, Any]) -> None:
    old = {"linear_attention": "mamba", "full_attention": "attention"}
    config["layer_types"] = [old[kind] for kind in config["layer_types"]]
    config["position_embedding_type"] = "rope"
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = None
    config["time_step_limit"] = [0.0, float("inf")]


def _other_list_name(config: dict[str, Any]) -> None:
    config["layers_block_type"] = config.pop("layer_types")


def _pattern(config: dict[str, Any]) -> None:
    config.pop("layer_types", None)
    config.pop("layers_block_type", None)
    config["hybrid_override_pattern"] = "M-*M"
    config["mamba_n_groups"] = config.pop("n_groups")
    config["mamba_d_conv"] = config.pop("conv_kernel")


def _old_lfm2_names(config: dict[str, Any]) -> None:
    config["full_attn_idxs"] = [i for i, kind in enumerate(config.pop("layer_types")) if kind == "full_attention"]
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["tie_embedding"] = config.pop("tie_word_embeddings")
    config["block_ff_dim"] = config.pop("intermediate_size")


def _old_qwen_names(config: dict[str, Any]) -> None:
    rope = config.pop("rope_parameters")
    config["rope_theta"], config["partial_rotary_factor"] = rope["rope_theta"], rope["partial_rotary_factor"]
    config["full_attention_interval"] = len(config.pop("layer_types"))


def _old_bamba_names(config: dict[str, Any]) -> None:
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["mamba_d_head"] = "auto"


@pytest.mark.parametrize(
    ("family", "fields", "respell"),
    [
        ("granite-hybrid", {"position_embedding_type": "rope"}, _old_mamba_names),
        ("granite-hybrid", {}, _other_list_name),
        ("nemotron-h", {}, _pattern),
        ("lfm2", {}, _old_lfm2_names),
        ("bamba", {}, _old_bamba_names),
        ("qwen3-5", {}, _old_qwen_names),
    ],
)
def test_old_and_new_spelling_of_a_config_are_the_same_model(
    family: str, fields: dict[str, Any], respell: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    write_random_checkpoint(family, tmp_path, **fields)
    prompts = random_prompts(120, (30,))
    new = run_whole(load_model(tmp_path, torch.float32, "cpu"), prompts)[0]
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    respell(config)
    file.write_text(json.dumps(config))
    old = run_whole(load_model(tmp_path, torch.float32, "cpu"), prompts)[0]
    assert torch.equal(new, old)
    assert_close(old, reference_logits(tmp_path, prompts)[0])


@pytest.mark.parametrize("family", ["granite-hybrid", "falcon-h1", "nemotron-h", "lfm2"])
def test_bfloat16_strays_from_float32_no_further_than_in_transformers(family: str, tmp_path: Path) -> None:
    write_random_checkpoint(family, tmp_path)
    prompts = random_prompts(120, (50,))
    exact = reference_logits(tmp_path, prompts)[0]
    theirs = (reference_logits(tmp_path, prompts, torch.bfloat16)[0] - exact).norm()
    model = load_model(tmp_path, torch.bfloat16, "cpu")
    ours = (run_whole(model, prompts)[0] - exact).norm()
    assert 0 < ours <= 1.5 * theirs
    kept = {part.name: part.dtype for spec in model.cache_specs() for part in spec.parts}
    assert kept["conv"] == kept["key"] == "bfloat16"
    assert kept.get("recurrent", "float32") == "float32"


@pytest.mark.parametrize(
    ("family", "fields", "match"),
    [
        ("granite-hybrid", {"position_embedding_type": "alibi"}, r"position_embedding_type must be 'rope' or 'nope'"),
        ("granite-hybrid", {"layer_types": ["mamba", "conv"] * 2}, r"layer_types must be made of .* got 'conv'"),
        ("granite-hybrid", {"hidden_act": "gelu"}, r"hidden_act must be 'silu'"),
        ("granite-hybrid", {"mamba_d_head": 7}, r"mamba_d_head must be 16"),
        ("granite-hybrid", {"mamba_n_groups": 3}, r"mamba_n_heads must be a multiple of mamba_n_groups"),
        ("granite-hybrid", {"time_step_limit": [1.0, 0.5]}, r"time_step_limit must be two numbers"),
        ("granite-hybrid", {"num_local_experts": 2, "num_experts_per_tok": 3}, r"num_experts_per_tok must be at most"),
        ("granite-hybrid", {"normalization_function": "layernorm"}, r"normalization_function must be 'rmsnorm'"),
        ("falcon-h1", {"mamba_use_mlp": False}, r"mamba_use_mlp must be true"),
        ("nemotron-h", {"num_hidden_layers": 5}, r"num_hidden_layers must be 4"),
        ("bamba", {"attn_layer_indices": [4]}, r"attn_layer_indices must be a list of integers from 0 to 3"),
        ("falcon-h1", {"ssm_multipliers": [1.0]}, r"ssm_multipliers must be a list of 5 numbers"),
        ("falcon-h1", {"mlp_multipliers": [1.0, -1.0]}, r"mlp_multipliers must be a list of finite numbers"),
        ("lfm2", {"conv_L_cache": 1}, r"conv_L_cache must be an integer of at least 2"),
        ("qwen3-5", {"attn_output_gate": False}, r"attn_output_gate must be true"),
        ("qwen3-5-moe", {"norm_topk_prob": False}, r"norm_topk_prob must be true"),
        ("qwen3-5-moe", {"mlp_only_layers": [1]}, r"mlp_only_layers is not supported"),
        ("nemotron-h", {"sliding_window": 64}, r"sliding_window is not supported"),
        ("nemotron-h", {"attention_bias": True}, r"attention_bias is not supported"),
        ("nemotron-h", {"mlp_hidden_act": "silu"}, r"mlp_hidden_act must be 'relu2'"),
        ("nemotron-h", {"residual_in_fp32": True}, r"residual_in_fp32 is not supported"),
    ],
)
def test_what_changes_the_maths_and_is_not_supported_is_refused_by_name(
    family: str, fields: dict[str, Any], match: str, tmp_path: Path
) -> None:
    write_random_checkpoint(family, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(CheckpointError, match=match):
        load_model(tmp_path, torch.float32, "cpu")
