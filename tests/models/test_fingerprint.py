"""The weights fingerprint says everything about the tensors and nothing about files, paths and times."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dalsegno.errors import CheckpointError
from dalsegno.models.checkpoint import config_fingerprint, weights_fingerprint
from tests.models.broken import edit_tensors, write_checkpoint, write_shards


def test_shards_order_path_and_time_do_not_enter(tmp_path: Path) -> None:
    one = write_checkpoint(tmp_path / "one")
    many = write_checkpoint(tmp_path / "many")
    write_shards(many, 3)
    turned = write_checkpoint(tmp_path / "turned")
    tensors = load_file(turned / "model.safetensors")
    save_file(dict(reversed(tensors.items())), turned / "model.safetensors", metadata={"note": "x"})
    os.utime(turned / "model.safetensors", (1, 1))
    assert weights_fingerprint(one) == weights_fingerprint(many) == weights_fingerprint(turned)


def _flip_sign(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"][3] *= -1


def _rename(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weights"] = tensors.pop("model.norm.weight")


def _narrow(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].half()


def _reshape(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].view(4, 4)


def _reinterpret(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].view(torch.int32)


def _exchange(tensors: dict[str, Tensor]) -> None:
    first, second = "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"
    tensors[first], tensors[second] = tensors[second].clone(), tensors[first].clone()


@pytest.mark.parametrize("edit", [_flip_sign, _rename, _narrow, _reshape, _reinterpret, _exchange])
def test_names_dtypes_shapes_and_bytes_all_enter(edit: Callable[[dict[str, Tensor]], None], tmp_path: Path) -> None:
    before = weights_fingerprint(write_checkpoint(tmp_path))
    edit_tensors(tmp_path, edit)
    assert weights_fingerprint(tmp_path) != before


def test_golden_value(tmp_path: Path) -> None:
    tensors = {
        "b": torch.arange(6, dtype=torch.float32).view(2, 3),
        "a": torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert weights_fingerprint(tmp_path) == "a3caf7378ce895e0343a7df1d22eb8942b5f5402a1c65047e23e994886a12432"


def test_corrupt_weights_have_no_fingerprint(tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        weights_fingerprint(tmp_path)


ORIGIN = {"_name_or_path": "x/y", "transformers_version": "9.9", "dtype": "float16", "torch_dtype": "bfloat16"}


def _edit_config(path: Path, **fields: object) -> str:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))
    return config_fingerprint(path)


def test_where_a_config_comes_from_does_not_enter_and_neither_does_the_order_of_fields(tmp_path: Path) -> None:
    before = config_fingerprint(write_checkpoint(tmp_path))
    assert _edit_config(tmp_path, **ORIGIN) == before
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=4))
    assert config_fingerprint(tmp_path) == before


def test_every_other_field_of_a_config_enters(tmp_path: Path) -> None:
    """70: the architecture too, which chooses the model that computes."""
    before = config_fingerprint(write_checkpoint(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    assert "architectures" in config
    found = {before}
    for name in [*(config.keys() - ORIGIN.keys()), "unheard_of"]:
        found.add(_edit_config(tmp_path, **{name: "changed"}))
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert len(found) == 1 + len(config.keys() - ORIGIN.keys()) + 1
    assert config_fingerprint(tmp_path) == before
