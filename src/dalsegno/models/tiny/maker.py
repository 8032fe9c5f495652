"""Writing a tiny model folder: config, weights, tokenizer, chat template, generation config."""

import json
from pathlib import Path
from typing import Any

import torch

from dalsegno.errors import OptionError
from dalsegno.models.registry import build_model
from dalsegno.models.tiny.kinds import TINY_KINDS, tiny_config
from dalsegno.models.tiny.tokenizer import write_tokenizer
from dalsegno.models.tiny.weights import tiny_weights
from dalsegno.options import check_integer

__all__ = ["TINY_KINDS", "make_tiny_model"]

_FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def make_tiny_model(kind: str, directory: Path, seed: int = 0) -> None:
    """Write a small float32 checkpoint in Hugging Face form; the same kind and seed give the same bytes.

    Args:
        kind: one of `TINY_KINDS`.
        directory: made if it is not there; an earlier tiny model in it is replaced.
        seed: of the weights.

    Raises:
        OptionError: an unknown kind, a bad seed, or a directory that holds other files.
    """
    if kind not in TINY_KINDS:
        raise OptionError(f"kind must be one of {', '.join(TINY_KINDS)}, got {kind!r}")
    check_integer("seed", seed, 0, 2**63 - 1)
    _prepare(directory)
    config = tiny_config(kind)
    _write_weights(directory / "model.safetensors", config, seed)
    write_tokenizer(directory)
    _write_json(directory / "generation_config.json", _generation_config(config))
    # Last, so that a folder whose making was cut short is no model folder.
    _write_json(directory / "config.json", config)


def _prepare(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise OptionError(f"the model directory must be a directory, got the file {directory}")
    directory.mkdir(parents=True, exist_ok=True)
    others = sorted(file.name for file in directory.iterdir() if file.name not in _FILES)
    if others:
        raise OptionError(f"the model directory {directory} must be new or hold a tiny model, but it has {others[0]!r}")
    (directory / "config.json").unlink(missing_ok=True)


def _write_weights(file: Path, config: dict[str, Any], seed: int) -> None:
    from safetensors.numpy import save

    targets = build_model(config, torch.float32, "meta").weight_targets()
    shapes = {name: target.shape for name, target in targets.items()}
    file.write_bytes(save(tiny_weights(shapes, config, seed), metadata={"format": "pt"}))


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "do_sample": False,
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
    }


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
