"""Every config field that changes the mathematics is honoured or refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dalsegno.errors import CheckpointError
from dalsegno.models.registry import build_model
from dalsegno.types import GroupKind
from tests.models.broken import CONFIGS

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act must be 'silu'.*got 'gelu'"),
    ("llama", {"hidden_size": None}, "no 'hidden_size'"),
    ("llama", {"hidden_size": "16"}, "hidden_size must be an integer of at least 1, got '16'"),
    ("llama", {"hidden_size": True}, "hidden_size must be an integer"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1, got 0"),
    (
        "llama",
        {"num_attention_heads": 3, "num_key_value_heads": 2},
        "num_attention_heads must be a multiple of num_key",
    ),
    ("llama", {"num_attention_heads": 3}, "hidden_size must be a multiple of num_attention_heads"),
    ("llama", {"rms_norm_eps": 0}, "rms_norm_eps must be a finite number greater than 0"),
    ("llama", {"attention_bias": 1}, "attention_bias must be true or false"),
    ("llama", {"mlp_bias": "no"}, "mlp_bias must be true or false"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ("llama", {"per_layer_config": {"0": {"hidden_size": 8}}}, "per_layer_config is not supported"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type must be .*'yarn'.*got 'dynamic'"),
    ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type must be .*got 'longrope'"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "no 'factor'"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": -1}}, "factor must be a finite number"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one set for all layers"),
    ("llama", {"rope_parameters": [1]}, "rope_parameters must be an object"),
    ("llama", {"rope_theta": "big"}, "rope_theta must be a finite number"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1 in this family, got 0.5"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types must be a list of 2 entries"),
    ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types must be made of 'full_attention'"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window must be true"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 0}, "sliding_window must be an integer of at least 1"),
    ("qwen3-next", {"partial_rotary_factor": 0.4}, "partial_rotary_factor must be an even part of head_dim=8, got 0.4"),
    ("qwen3-next", {"partial_rotary_factor": 1.5}, "partial_rotary_factor must be an even part"),
    (
        "qwen3-next",
        {"linear_num_value_heads": 3, "linear_num_key_heads": 2},
        "linear_num_value_heads must be a multiple",
    ),
    ("qwen3-next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be an integer of at least 2"),
    ("qwen3-next", {"num_experts_per_tok": 3}, "num_experts_per_tok must be at most num_experts=2, got 3"),
    ("qwen3-next", {"mlp_only_layers": [2]}, "mlp_only_layers must be a list of integers from 0 to 1"),
    ("qwen3-next", {"mlp_only_layers": "all"}, "mlp_only_layers must be a list of integers"),
    ("qwen3-next", {"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer of at least 1"),
    ("qwen3-next", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types must be made of"),
]


@pytest.mark.parametrize(("family", "fields", "message"), REFUSED)
def test_fields_that_are_not_supported_are_refused_by_name(family: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build_model({**CONFIGS[family], **fields}, torch.float32, "meta")


@pytest.mark.parametrize("family", list(CONFIGS))
def test_fields_without_effect_are_ignored(family: str) -> None:
    fields = {"attention_dropout": 0.1, "use_cache": False, "initializer_range": 1, "router_aux_loss_coef": 0.1}
    plain = build_model(dict(CONFIGS[family]), torch.float32, "meta").weight_targets()
    assert build_model({**CONFIGS[family], **fields}, torch.float32, "meta").weight_targets().keys() == plain.keys()


@pytest.mark.parametrize("family", list(CONFIGS))
def test_targets_cover_every_parameter_exactly_once(family: str) -> None:
    model = build_model({**CONFIGS[family], "attention_bias": True}, torch.float32, "cpu")
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.zero_()
    for target in model.weight_targets().values():
        target.destination.add_(1)
    assert all(bool((parameter == 1).all()) for parameter in parameters)


@pytest.mark.parametrize(
    ("family", "fields", "kv_heads"),
    [
        ("llama", {}, 2),
        ("llama", {"num_key_value_heads": 1}, 1),
        ("qwen3", {"num_attention_heads": 64}, 32),
        ("qwen3", {"num_attention_heads": 64, "num_key_value_heads": None}, 64),
        ("qwen3-next", {"num_attention_heads": 4}, 2),
    ],
)
def test_absent_kv_heads_mean_what_the_family_says(family: str, fields: dict[str, Any], kv_heads: int) -> None:
    config = {name: value for name, value in CONFIGS[family].items() if name != "num_key_value_heads"}
    specs = build_model({**config, "num_hidden_layers": 4, **fields}, torch.float32, "meta").cache_specs()
    assert specs[3].parts[0].shape[0] == kv_heads


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, [None, None]),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, [None, 8]),
        ({"use_sliding_window": True, "sliding_window": 8}, [None, None]),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}, [4096, None]),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, [8, 8]),
    ],
)
def test_windows_of_qwen3(fields: dict[str, Any], windows: list[int | None]) -> None:
    specs = build_model({**CONFIGS["qwen3"], **fields}, torch.float32, "meta").cache_specs()
    assert [spec.window for spec in specs] == windows
    assert [spec.kind is GroupKind.WINDOW for spec in specs] == [window is not None for window in windows]


@pytest.mark.parametrize(
    ("fields", "states"),
    [
        ({"num_hidden_layers": 8}, [True, True, True, False] * 2),
        ({"num_hidden_layers": 4, "full_attention_interval": 2}, [True, False] * 2),
        ({"layer_types": ["full_attention", "linear_attention"]}, [False, True]),
    ],
)
def test_layer_kinds_of_qwen3_next(fields: dict[str, Any], states: list[bool]) -> None:
    specs = build_model({**CONFIGS["qwen3-next"], **fields}, torch.float32, "meta").cache_specs()
    assert [spec.kind is GroupKind.STATE for spec in specs] == states
    assert [spec.layer for spec in specs] == list(range(len(states)))


def test_cache_parts_have_the_documented_shapes() -> None:
    specs = build_model({**CONFIGS["qwen3-next"], "full_attention_interval": 2}, torch.bfloat16, "meta").cache_specs()
    state, attention = ({part.name: (part.shape, part.dtype) for part in spec.parts} for spec in specs)
    assert state == {"conv": ((16, 3), "bfloat16"), "recurrent": ((2, 4, 4), "float32")}
    assert attention == {"key": ((1, 8), "bfloat16"), "value": ((1, 8), "bfloat16")}


def test_families_need_no_transformers(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, torch; from dalsegno.models.registry import build_model;"
        f"build_model({CONFIGS['qwen3-next']!r}, torch.float32, 'cpu');"
        "assert not {'transformers', 'tokenizers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
