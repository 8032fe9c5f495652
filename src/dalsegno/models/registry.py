"""Which architectures can be served, and how a model folder becomes a model.

A family is one module with `build(fields, dtype)`; adding one is that module and a line in `FAMILIES`.
"""

import importlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from dalsegno.errors import CheckpointError
from dalsegno.models.base import CausalLM
from dalsegno.models.checkpoint import Checkpoint, open_weights, read_config
from dalsegno.models.config_fields import ConfigFields
from dalsegno.models.weights import check_weights, load_weights, present_targets

__all__ = ["FAMILIES", "build_model", "load_model", "read_dtype"]

FAMILIES = {
    "BambaForCausalLM": "dalsegno.models.bamba",
    "FalconH1ForCausalLM": "dalsegno.models.falcon_h1",
    "GraniteMoeHybridForCausalLM": "dalsegno.models.granite_moe_hybrid",
    "Lfm2ForCausalLM": "dalsegno.models.lfm2",
    "LlamaForCausalLM": "dalsegno.models.llama",
    "NemotronHForCausalLM": "dalsegno.models.nemotron_h",
    "Qwen3_5ForCausalLM": "dalsegno.models.qwen3_5",
    "Qwen3_5ForConditionalGeneration": "dalsegno.models.qwen3_5",
    "Qwen3_5MoeForCausalLM": "dalsegno.models.qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "dalsegno.models.qwen3_5",
    "Qwen3ForCausalLM": "dalsegno.models.qwen3",
    "Qwen3NextForCausalLM": "dalsegno.models.qwen3_next",
}
"""Architecture, as config.json names it -> module of its family."""

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def build_model(config: dict[str, object], dtype: torch.dtype, device: torch.device | str) -> CausalLM:
    """Build the model that a config.json describes, with empty parameters.

    Raises:
        CheckpointError: an architecture or a field that is not supported.
    """
    module = importlib.import_module(FAMILIES[_architecture(config)])
    with torch.device(device):
        model = cast(CausalLM, module.build(ConfigFields(config), dtype))
    return model.eval()


def load_model(path: Path, dtype: torch.dtype, device: torch.device | str) -> CausalLM:
    """Load a model folder.

    The checkpoint is compared with the model before any memory is taken for parameters.

    Args:
        path: folder with config.json and safetensors files.
        dtype: of parameters, activations and KV; tensors are converted.
        device: where the model will run.

    Raises:
        CheckpointError: naming what is missing, extra, misshapen, corrupt or not supported, and what is.
    """
    config = read_config(path)
    skeleton = build_model(config, dtype, "meta")
    checkpoint = open_weights(path)
    check_weights(
        checkpoint,
        present_targets(checkpoint, skeleton.weight_targets(), skeleton.fused_tensors()),
        duplicates=skeleton.tied_tensors(),
        ignored=skeleton.ignored_tensors,
        owner=_architecture(config),
    )
    _log_ignored(checkpoint, skeleton.ignored_tensors)
    model = build_model(config, dtype, device)
    targets = present_targets(checkpoint, model.weight_targets(), model.fused_tensors())
    load_weights(checkpoint, targets, duplicates=model.tied_tensors())
    return model


def _log_ignored(checkpoint: Checkpoint, patterns: Sequence[str]) -> None:
    """Say in one line which tensors are left out, by their leading names."""
    ignored = [name for name in checkpoint.tensors if any(re.fullmatch(pattern, name) for pattern in patterns)]
    if ignored:
        groups = sorted({".".join(name.split(".")[: 2 if name.startswith("model.") else 1]) for name in ignored})
        _log.info("%d tensors are not used: %s", len(ignored), ", ".join(f"{group}.*" for group in groups))


def read_dtype(path: Path) -> torch.dtype:
    """Return the dtype a model folder's config.json names, float32 where it names none.

    Raises:
        CheckpointError: it names one that is not supported.
    """
    config = read_config(path)
    text = config.get("text_config")
    levels = [config, text] if isinstance(text, dict) else [config]
    given = (level.get(field) for level in levels for field in ("dtype", "torch_dtype"))
    name = next((name for name in given if name), "float32")
    if not isinstance(name, str) or name not in _DTYPES:
        raise CheckpointError(f"{path}: config.json has dtype {name!r}; supported: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _architecture(config: dict[str, object]) -> str:
    given = config.get("architectures")
    names = given if isinstance(given, list) else []
    for name in names:
        if name in FAMILIES:
            return str(name)
    raise CheckpointError(f"architecture {names or given!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
