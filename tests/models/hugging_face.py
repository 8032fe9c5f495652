"""The same checkpoints through transformers, and random checkpoints that transformers writes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "initializer_range": 0.1,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "vocab_size": 120,
}
_WITHOUT_HEAD_DIM = {name: size for name, size in _SIZES.items() if name != "head_dim"}
_DELTA: dict[str, Any] = {
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_value_head_dim": 12,
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 40,
}
_MAMBA: dict[str, Any] = {
    "mamba_chunk_size": 16,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_expand": 2,
    "mamba_n_groups": 2,
    "mamba_n_heads": 8,
}
_NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    "mamba_head_dim": 16,
    "mamba_num_heads": 8,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "n_groups": 2,
    "n_routed_experts": 8,
    "ssm_state_size": 12,
}
_ALTERNATING = ["linear_attention", "full_attention"] * 2

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("Bamba", _WITHOUT_HEAD_DIM | _MAMBA | {"attn_layer_indices": [1, 3]}),
    "falcon-h1": ("FalconH1", _WITHOUT_HEAD_DIM | _MAMBA | {"mamba_d_ssm": 128}),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        _WITHOUT_HEAD_DIM
        | _MAMBA
        | {"layer_types": _ALTERNATING, "num_local_experts": 0, "shared_intermediate_size": 40},
    ),
    "lfm2": (
        "Lfm2",
        _WITHOUT_HEAD_DIM
        | {"block_multiple_of": 32, "layer_types": ["conv", "conv", "full_attention"] * 2, "num_hidden_layers": 6},
    ),
    "llama": ("Llama", _SIZES),
    "nemotron-h": ("NemotronH", {k: v for k, v in _SIZES.items() if k != "num_hidden_layers"} | _NEMOTRON),
    "qwen3": ("Qwen3", _SIZES),
    "qwen3-5": ("Qwen3_5", _SIZES | _DELTA),
    "qwen3-5-moe": ("Qwen3_5Moe", _SIZES | _DELTA | _EXPERTS),
    "qwen3-next": ("Qwen3Next", _SIZES | _DELTA | _EXPERTS),
}
_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": _SIZES["hidden_size"],
}


def write_random_checkpoint(
    family: str, path: Path, *, max_shard_size: str = "1GB", seed: int = 0, **fields: Any
) -> None:
    """Write a random checkpoint of a family, whose norms, biases and gates all matter."""
    import transformers

    name, sizes = _FAMILIES[family]
    config_class = f"{name}TextConfig" if name.startswith("Qwen3_5") else f"{name}Config"
    config = getattr(transformers, config_class)(**(sizes | fields))
    _save_random(getattr(transformers, f"{name}ForCausalLM"), config, path, max_shard_size, seed)


def write_multimodal_checkpoint(family: str, path: Path, *, tied: bool = False, **fields: Any) -> None:
    """Write a random checkpoint with a vision part and a family as its text part."""
    import transformers

    name, sizes = _FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(
        text_config=sizes | {"tie_word_embeddings": tied} | fields, vision_config=_VISION, tie_word_embeddings=tied
    )
    _save_random(getattr(transformers, f"{name}ForConditionalGeneration"), config, path, "1GB", 0)


def _save_random(model_class: Any, config: Any, path: Path, max_shard_size: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(path, max_shard_size=max_shard_size)


def reference_logits(path: Path, prompts: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the logits `[len(prompt), vocab]` of each prompt, by transformers."""
    model = _model_class(path).from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    with torch.inference_mode():
        return [
            cast(Tensor, model(torch.tensor([list(prompt)]), use_cache=False).logits[0].float()) for prompt in prompts
        ]


def _model_class(path: Path) -> Any:
    import transformers

    architecture = json.loads((path / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture)
