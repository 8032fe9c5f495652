"""Every way a model folder can be wrong is an error that names it and what is supported."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dalsegno.errors import CheckpointError
from dalsegno.models.checkpoint import read_end_token_ids, resolve_model_path
from dalsegno.models.registry import FAMILIES, load_model, read_dtype
from tests.models.broken import edit_config, edit_tensors, write_checkpoint, write_shards

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def _assert_refused(path: Path, *named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_model(path, torch.float32, "cpu")
    for part in named:
        assert part in str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def test_a_whole_checkpoint_loads(folder: Path) -> None:
    assert load_model(folder, torch.float32, "cpu").vocab_size == 10


def test_missing_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    _assert_refused(folder, "config.json", "missing")


@pytest.mark.parametrize("content", ["{", "\x00", "[1]", '"text"'])
def test_unreadable_config(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    _assert_refused(folder, "config.json", "JSON")


@pytest.mark.parametrize("names", [["GPT2LMHeadModel"], [], None, "LlamaForCausalLM"])
def test_unsupported_architecture_names_the_supported_ones(folder: Path, names: Any) -> None:
    edit_config(folder, lambda config: config.update(architectures=names))
    _assert_refused(folder, "architecture", ", ".join(sorted(FAMILIES)))


@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_quantised_weights(folder: Path, field: str) -> None:
    edit_config(folder, lambda config: config.update({field: {"quant_method": "fp8"}}))
    _assert_refused(folder, "quantization_config", "'fp8'", "float32, float16 and bfloat16")


@pytest.mark.parametrize("others", [[], ["pytorch_model.bin"], ["model.gguf"]])
def test_no_safetensors(folder: Path, others: list[str]) -> None:
    (folder / WEIGHTS).unlink()
    for name in others:
        (folder / name).write_bytes(b"x")
    _assert_refused(folder, "no weights", WEIGHTS, *others)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_safetensors(folder: Path, keep: int) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:keep])
    _assert_refused(folder, WEIGHTS, "not a readable safetensors file")


def test_corrupt_safetensors_header(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:8] + b"\xff" * 20 + content[28:])
    _assert_refused(folder, WEIGHTS, "not a readable safetensors file")


def _drop(*names: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


def _put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


def test_missing_tensor(folder: Path) -> None:
    edit_tensors(folder, _drop(Q_PROJ))
    _assert_refused(folder, f"missing tensor '{Q_PROJ}'", "LlamaForCausalLM")


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: [tensors.pop(name) for name in list(tensors)[:9]])
    _assert_refused(folder, "and 5 more")


def test_missing_output_head_of_untied_embeddings(folder: Path) -> None:
    edit_tensors(folder, _drop("lm_head.weight"))
    _assert_refused(folder, "missing tensor 'lm_head.weight'")


def test_unexpected_tensor(folder: Path) -> None:
    edit_tensors(folder, _put("model.layers.2.self_attn.q_proj.weight", torch.zeros(2)))
    _assert_refused(folder, "unexpected tensor 'model.layers.2.self_attn.q_proj.weight'")


@pytest.mark.parametrize("shape", [(16, 15), (16,), (1, 16, 16), (0, 16)])
def test_misshapen_tensor(folder: Path, shape: tuple[int, ...]) -> None:
    edit_tensors(folder, _put(Q_PROJ, torch.zeros(shape)))
    _assert_refused(folder, Q_PROJ, f"shape {list(shape)}, expected [16, 16]")


@pytest.mark.parametrize(("dtype", "name"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_tensor_of_an_unsupported_dtype(folder: Path, dtype: torch.dtype, name: str) -> None:
    edit_tensors(folder, _put(Q_PROJ, torch.zeros(16, 16).to(dtype)))
    _assert_refused(folder, Q_PROJ, f"dtype {name}", "F32, F16, BF16")


def test_all_problems_are_named_at_once(folder: Path) -> None:
    edit_tensors(folder, _drop("model.norm.weight"))
    edit_tensors(folder, _put("model.bonus", torch.zeros(1)))
    edit_tensors(folder, _put(Q_PROJ, torch.zeros(3)))
    _assert_refused(folder, "model.norm.weight", "model.bonus", Q_PROJ)


def test_tied_copy_that_differs(folder: Path) -> None:
    edit_config(folder, lambda config: config.update(tie_word_embeddings=True))
    _assert_refused(folder, "lm_head.weight", "model.embed_tokens.weight", "tie_word_embeddings")


def test_tied_copy_that_is_equal_loads(folder: Path) -> None:
    edit_config(folder, lambda config: config.update(tie_word_embeddings=True))
    edit_tensors(
        folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    load_model(folder, torch.float32, "cpu")


def test_prediction_layers_of_qwen3_next_are_left_alone(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3-next")
    edit_tensors(folder, _put("mtp.layers.0.norm.weight", torch.zeros(2)))
    load_model(folder, torch.float32, "cpu")


def test_missing_shard(folder: Path) -> None:
    write_shards(folder, 3)
    (folder / "part-1.safetensors").unlink()
    _assert_refused(folder, INDEX, "'part-1.safetensors'")


def test_index_that_names_a_file_outside_the_folder(folder: Path) -> None:
    weight_map = write_shards(folder, 2)
    (folder / "part-1.safetensors").rename(folder.parent / "part-1.safetensors")
    moved = {name: file.replace("part-1", "../part-1") for name, file in weight_map.items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": moved}))
    _assert_refused(folder, INDEX, "'../part-1.safetensors'")


def test_shard_without_a_promised_tensor(folder: Path) -> None:
    weight_map = write_shards(folder, 2)
    (folder / INDEX).write_text(json.dumps({"weight_map": {**weight_map, "ghost": "part-0.safetensors"}}))
    _assert_refused(folder, "'ghost'", "part-0.safetensors", "lacks")


def test_shard_with_a_tensor_that_belongs_elsewhere(folder: Path) -> None:
    weight_map = write_shards(folder, 2)
    name = next(name for name, file in weight_map.items() if file == "part-0.safetensors")
    del weight_map[name]
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    _assert_refused(folder, f"'{name}'", "part-0.safetensors", "does not place")


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_unreadable_index(folder: Path, content: str) -> None:
    write_shards(folder, 2)
    (folder / INDEX).write_text(content)
    _assert_refused(folder, INDEX)


def test_corrupt_shard(folder: Path) -> None:
    write_shards(folder, 2)
    file = folder / "part-1.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    _assert_refused(folder, "part-1.safetensors", "not a readable safetensors file")


def test_missing_folder_and_file_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model folder"):
        resolve_model_path(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no model folder"):
        resolve_model_path("./nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="got the file"):
        resolve_model_path(tmp_path / "file")


def test_folder_is_found_and_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model_path(str(tmp_path)) == tmp_path
    asked: list[str] = []

    def download(hub_id: str, **_: Any) -> str:
        asked.append(hub_id)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model_path("owner/some-model_1.5") == tmp_path
    assert asked == ["owner/some-model_1.5"]


def test_hub_that_cannot_deliver(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"owner/name.*no route"):
        resolve_model_path("owner/name")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3, 4]}, 5, {3, 4}),
        ({"eos_token_id": 0}, 5, {0}),
        ({}, 5, {5}),
        (None, [6], {6}),
        (None, None, set()),
    ],
)
def test_end_tokens_come_from_generation_config_first(
    folder: Path, generation: dict[str, Any] | None, config: Any, expected: set[int]
) -> None:
    edit_config(folder, lambda fields: fields.update(eos_token_id=config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert read_end_token_ids(folder) == expected


@pytest.mark.parametrize("bad", ["</s>", [1, None], -1, True])
def test_bad_end_tokens(folder: Path, bad: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": bad}))
    with pytest.raises(CheckpointError, match=re.escape(f"got {bad!r}")):
        read_end_token_ids(folder)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({}, torch.float32),
    ],
)
def test_dtype_of_a_checkpoint(folder: Path, fields: dict[str, Any], expected: torch.dtype) -> None:
    edit_config(folder, lambda config: config.update(fields))
    assert read_dtype(folder) == expected


def test_unsupported_dtype_of_a_checkpoint(folder: Path) -> None:
    edit_config(folder, lambda config: config.update(dtype="int4"))
    with pytest.raises(CheckpointError, match=r"'int4'.*float32, float16, bfloat16"):
        read_dtype(folder)
