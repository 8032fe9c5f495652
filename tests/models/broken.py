"""Small valid checkpoints to break one thing in."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dalsegno.models.registry import build_model

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 16,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 10,
    },
}
CONFIGS["qwen3"] = {**CONFIGS["llama"], "architectures": ["Qwen3ForCausalLM"], "head_dim": 8, "num_key_value_heads": 2}
CONFIGS["qwen3-next"] = {
    **CONFIGS["qwen3"],
    "architectures": ["Qwen3NextForCausalLM"],
    "linear_key_head_dim": 4,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 4,
    "moe_intermediate_size": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "num_key_value_heads": 1,
    "shared_expert_intermediate_size": 8,
}

Edit = Callable[[dict[str, Any]], object]


def write_checkpoint(path: Path, family: str = "llama", **fields: Any) -> Path:
    """Write a checkpoint with fixed random weights; a field given as None is null."""
    config = {**CONFIGS[family], **fields}
    source = torch.Generator().manual_seed(0)
    targets = build_model(config, torch.float32, "meta").weight_targets()
    tensors = {name: torch.randn(target.shape, generator=source) for name, target in sorted(targets.items())}
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def edit_config(path: Path, edit: Edit) -> None:
    """Change config.json of a checkpoint."""
    config = json.loads((path / "config.json").read_text())
    edit(config)
    (path / "config.json").write_text(json.dumps(config))


def edit_tensors(path: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a checkpoint."""
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


def write_shards(path: Path, num_shards: int) -> dict[str, str]:
    """Spread a checkpoint's tensors over shards, round robin; return the weight map."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {name: f"part-{i % num_shards}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name, owner in weight_map.items() if owner == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map
