"""The same checkpoints through transformers, and random checkpoints that transformers writes."""

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
_HYBRID: dict[str, Any] = {
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_value_head_dim": 12,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 40,
}


def write_random_checkpoint(
    family: str, path: Path, *, max_shard_size: str = "1GB", seed: int = 0, **fields: Any
) -> None:
    """Write a random checkpoint of `family` (llama, qwen3, qwen3-next) whose norms, biases and gates all matter."""
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "qwen3-next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
    }[family]
    sizes = _SIZES | (_HYBRID if family == "qwen3-next" else {})
    torch.manual_seed(seed)
    model = model_class(config_class(**(sizes | fields)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(path, max_shard_size=max_shard_size)


def reference_logits(path: Path, prompts: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the logits `[len(prompt), vocab]` of each prompt, by transformers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    with torch.inference_mode():
        return [cast(Tensor, model(torch.tensor([list(prompt)])).logits[0].float()) for prompt in prompts]
