"""config.json of each kind of tiny model."""

from typing import Any

from dalsegno.models.tiny.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE

__all__ = ["TINY_KINDS", "tiny_config"]

TINY_KINDS = ("qwen3-next", "llama", "qwen3", "qwen3-window")
"""Names that `make_tiny_model` takes."""

_WINDOW = 64

_COMMON: dict[str, Any] = {
    "dtype": "float32",
    "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 256,
    "max_position_embeddings": 32768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "pad_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "vocab_size": VOCAB_SIZE,
}

_DENSE: dict[str, Any] = {"attention_bias": False, "intermediate_size": 512, "num_hidden_layers": 4}

_QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **_DENSE}

_KINDS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False, **_DENSE},
    "qwen3": {**_QWEN3, "layer_types": ["full_attention"] * 4, "sliding_window": None, "use_sliding_window": False},
    "qwen3-window": {
        **_QWEN3,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "sliding_window": _WINDOW,
        "use_sliding_window": True,
    },
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "intermediate_size": 512,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_value_head_dim": 64,
        "mlp_only_layers": [],
        "model_type": "qwen3_next",
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 8,
        "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000.0, "rope_type": "default"},
        "shared_expert_intermediate_size": 128,
    },
}


def tiny_config(kind: str) -> dict[str, Any]:
    """Return a new config.json object of one of `TINY_KINDS`."""
    return dict(sorted({**_COMMON, **_KINDS[kind]}.items()))
