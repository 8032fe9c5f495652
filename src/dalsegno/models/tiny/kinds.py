"""config.json of each kind of tiny model."""

from typing import Any

from dalsegno.models.tiny.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE

__all__ = ["TINY_KINDS", "tiny_config"]

TINY_KINDS = (
    "qwen3-next",
    "llama",
    "qwen3",
    "qwen3-window",
    "granite-hybrid",
    "granite-hybrid-moe",
    "qwen3-5",
    "qwen3-5-moe",
    "bamba",
    "falcon-h1",
    "nemotron-h",
    "lfm2",
)
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

_LINEAR: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 64,
    "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000.0, "rope_type": "default"},
}

_MAMBA: dict[str, Any] = {
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 16,
    "mamba_proj_bias": False,
}

_GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.125,
    "embedding_multiplier": 4.0,
    "logits_scaling": 2.0,
    "model_type": "granitemoehybrid",
    "residual_multiplier": 0.5,
    **_MAMBA,
}

_HYBRID_TYPES = (["linear_attention"] * 3 + ["full_attention"]) * 2

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
        "layer_types": _HYBRID_TYPES,
        "mlp_only_layers": [],
        "model_type": "qwen3_next",
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 8,
        "shared_expert_intermediate_size": 128,
        **_LINEAR,
    },
    "qwen3-5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "attention_bias": False,
        "intermediate_size": 512,
        "layer_types": _HYBRID_TYPES,
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 8,
        **_LINEAR,
    },
    "qwen3-5-moe": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "attention_bias": False,
        "layer_types": _HYBRID_TYPES[:4],
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "shared_expert_intermediate_size": 128,
        **_LINEAR,
    },
    "granite-hybrid": {
        **_GRANITE,
        "layer_types": _HYBRID_TYPES,
        "num_experts_per_tok": 0,
        "num_hidden_layers": 8,
        "num_local_experts": 0,
        "position_embedding_type": "nope",
        "rope_parameters": None,
        "shared_intermediate_size": 512,
    },
    "granite-hybrid-moe": {
        **_GRANITE,
        "intermediate_size": 128,
        "layer_types": _HYBRID_TYPES[1:4] * 2,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 6,
        "num_local_experts": 4,
        "position_embedding_type": "rope",
        "shared_intermediate_size": 128,
    },
    "bamba": {
        "architectures": ["BambaForCausalLM"],
        "attention_bias": False,
        "attn_layer_indices": [2, 5],
        "intermediate_size": 512,
        "mlp_bias": False,
        "model_type": "bamba",
        "num_hidden_layers": 6,
        "rope_parameters": _LINEAR["rope_parameters"] | {"partial_rotary_factor": 0.5},
        **_MAMBA,
    },
    "falcon-h1": {
        "architectures": ["FalconH1ForCausalLM"],
        "attention_bias": False,
        "attention_in_multiplier": 0.5,
        "attention_out_multiplier": 1.0,
        "embedding_multiplier": 2.0,
        "intermediate_size": 512,
        "key_multiplier": 2.0,
        "lm_head_multiplier": 0.5,
        "mamba_d_ssm": 512,
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": True,
        "mlp_bias": False,
        "mlp_multipliers": [0.5, 1.0],
        "model_type": "falcon_h1",
        "num_hidden_layers": 4,
        "projectors_bias": False,
        "ssm_in_multiplier": 2.0,
        "ssm_multipliers": [0.5, 0.5, 0.5, 0.5, 0.5],
        "ssm_out_multiplier": 1.0,
        **_MAMBA,
    },
    "nemotron-h": {
        "architectures": ["NemotronHForCausalLM"],
        "attention_bias": False,
        "conv_kernel": 4,
        "intermediate_size": 512,
        "layer_norm_epsilon": 1e-6,
        "layers_block_type": ["linear_attention", "mlp", "linear_attention", "mlp", "full_attention"] * 2,
        "mamba_head_dim": 32,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 16,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "model_type": "nemotron_h",
        "n_groups": 2,
        "ssm_state_size": 32,
        "time_step_min": 0.001,
        "use_bias": False,
        "use_conv_bias": True,
    },
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
        "conv_bias": False,
        "intermediate_size": 512,
        "layer_types": ["conv", "conv", "full_attention"] * 2,
        "model_type": "lfm2",
        "norm_eps": 1e-6,
        "num_hidden_layers": 6,
    },
}


def tiny_config(kind: str) -> dict[str, Any]:
    """Return a new config.json object of one of `TINY_KINDS`."""
    fields = {**_COMMON, **_KINDS[kind]}
    return dict(sorted((name, value) for name, value in fields.items() if value is not None or name not in _COMMON))
