"""Tiny models have the promised sizes, the same bytes for the same seed, and answers worth testing on."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dalsegno.errors import OptionError
from dalsegno.models.checkpoint import read_end_token_ids, weights_fingerprint
from dalsegno.models.tiny import TINY_KINDS, make_tiny_model
from dalsegno.types import GroupKind
from tests.models.conftest import FolderOf, ModelOf
from tests.models.harness import ModelRunner


def _config(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "config.json").read_text())
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_common_sizes(kind: str, tiny_folder: FolderOf) -> None:
    config = _config(tiny_folder(kind))
    assert (config["vocab_size"], config["max_position_embeddings"]) == (4096, 32768)
    assert config["tie_word_embeddings"] is False
    tensors = load_file(tiny_folder(kind) / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    embedding = "backbone.embeddings.weight" if kind == "nemotron-h" else "model.embed_tokens.weight"
    assert not torch.equal(tensors["lm_head.weight"], tensors[embedding])


def test_qwen3_next_has_the_sizes_of_the_design(tiny_folder: FolderOf) -> None:
    config = _config(tiny_folder("qwen3-next"))
    expected = {
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    }
    assert {name: config[name] for name in expected} == expected


def test_decays_have_half_lives_log_spaced_from_8_to_512_tokens(tiny_folder: FolderOf) -> None:
    tensors = load_file(tiny_folder("qwen3-next") / "model.safetensors")
    for layer in (0, 1, 2, 4, 5, 6):
        prefix = f"model.layers.{layer}.linear_attn"
        rate = tensors[f"{prefix}.A_log"].exp() * torch.nn.functional.softplus(tensors[f"{prefix}.dt_bias"])
        half_lives = math.log(2) / rate
        torch.testing.assert_close(half_lives, 8 * 64 ** (torch.arange(8) / 7), rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", ["granite-hybrid", "bamba", "falcon-h1", "nemotron-h"])
def test_mamba_decays_have_half_lives_log_spaced_from_8_to_512_tokens(kind: str, tiny_folder: FolderOf) -> None:
    tensors = load_file(tiny_folder(kind) / "model.safetensors")
    prefixes = [name.removesuffix("A_log") for name in tensors if name.endswith("A_log")]
    assert prefixes
    for prefix in prefixes:
        rate = tensors[f"{prefix}A_log"].exp() * torch.nn.functional.softplus(tensors[f"{prefix}dt_bias"])
        torch.testing.assert_close(math.log(2) / rate, 8 * 64 ** (torch.arange(16) / 15), rtol=1e-4, atol=0)
        assert torch.equal(tensors[f"{prefix}D"], torch.full((16,), 0.1))


def test_lfm2_keeps_windows_of_convolutions_and_nothing_else(tiny_model: ModelOf) -> None:
    specs = [spec for spec in tiny_model("lfm2").cache_specs() if spec.kind is GroupKind.STATE]
    assert [[part.name for part in spec.parts] for spec in specs] == [["conv"]] * 4


def test_falcon_h1_keeps_a_state_and_attention_in_every_layer(tiny_model: ModelOf) -> None:
    specs = tiny_model("falcon-h1").cache_specs()
    assert [spec.layer for spec in specs] == list(range(8))
    assert [spec.kind for spec in specs] == [GroupKind.STATE, GroupKind.ATTENTION] * 4


def test_qwen3_window_sees_64_tokens_in_every_second_layer(tiny_model: ModelOf) -> None:
    specs = tiny_model("qwen3-window").cache_specs()
    assert [spec.window for spec in specs] == [None, 64, None, 64]
    assert all((spec.kind is GroupKind.WINDOW) == (spec.window is not None) for spec in specs)


def test_same_seed_gives_the_same_files_in_another_process(tiny_folder: FolderOf, tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from dalsegno.models.tiny import make_tiny_model;"
        f"make_tiny_model('qwen3-next', Path({str(tmp_path)!r}))"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONHASHSEED": "123", "PYTHONPATH": ":".join(sys.path)}
    )
    first = tiny_folder("qwen3-next")
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(file.name for file in first.iterdir())
    for file in first.iterdir():
        assert file.read_bytes() == (tmp_path / file.name).read_bytes(), file.name


def test_another_seed_gives_other_weights_and_the_same_tokenizer(tiny_folder: FolderOf, tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path, seed=1)
    assert weights_fingerprint(tmp_path) != weights_fingerprint(tiny_folder("llama"))
    for name in ("tokenizer.json", "config.json"):
        assert (tmp_path / name).read_bytes() == (tiny_folder("llama") / name).read_bytes()


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_answers_neither_repeat_a_token_nor_hang_on_ties(kind: str, tiny_model: ModelOf) -> None:
    num_rows, length = 8, 60
    runner = ModelRunner(tiny_model(kind), num_rows, 40 + length)
    source = torch.Generator().manual_seed(2)
    step = {row: torch.randint(3, 4096, (40,), generator=source).tolist() for row in range(num_rows)}
    answers: dict[int, list[int]] = {row: [] for row in step}
    ties = 0
    for _ in range(length):
        logits = runner.logits(step)
        best = logits.topk(2).values
        ties += int(((best[:, 0] - best[:, 1]) <= 1e-4 * (1 + logits.abs().amax(-1))).sum())
        step = {row: [token] for row, token in enumerate(logits.argmax(-1).tolist())}
        for row, tokens in step.items():
            answers[row] += tokens
    assert all(len(set(answer)) > length // 2 for answer in answers.values())
    assert len({token for answer in answers.values() for token in answer}) > length * num_rows // 3
    assert ties <= 0.02 * num_rows * length


@pytest.mark.parametrize("prompt_length", [700])
@pytest.mark.parametrize("kind", [kind for kind in TINY_KINDS if kind not in ("llama", "qwen3", "qwen3-window")])
def test_rounding_stays_far_below_what_counts_as_another_answer(
    kind: str, prompt_length: int, tiny_model: ModelOf
) -> None:
    model = tiny_model(kind)
    tokens = torch.randint(3, 4096, (prompt_length,), generator=torch.Generator().manual_seed(4)).tolist()
    whole = ModelRunner(model, 1, prompt_length).logits({0: tokens})
    runner = ModelRunner(model, 1, prompt_length)
    for begin in range(0, prompt_length, 37):
        split = runner.logits({0: tokens[begin : begin + 37]})
    assert (whole - split).abs().max() <= 0.2e-4 * (1 + whole.abs().max())


@pytest.mark.parametrize("kind", ["qwen3-next", "qwen3-5-moe", "granite-hybrid-moe"])
def test_router_never_depends_on_rounding(kind: str, tiny_folder: FolderOf) -> None:
    """The experts of a token follow from dimensions that only the embedding writes, with a wide margin."""
    tensors = load_file(tiny_folder(kind) / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    written = torch.zeros(256, dtype=torch.bool)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "output_linear.weight")):
            written |= (tensor != 0).any(-1).view(-1, 256).any(0)
    routers = [tensor for name, tensor in tensors.items() if name.endswith(("mlp.gate.weight", "router.layer.weight"))]
    assert len(routers) == _config(tiny_folder(kind))["num_hidden_layers"]
    embedding = embedding / embedding.square().mean(-1, keepdim=True).sqrt()
    for router in routers:
        assert not ((router != 0).any(0) & written).any()
        scores = (embedding @ router.T).sort(dim=-1, descending=True).values
        assert (scores[:, 1] - scores[:, 2]).min() > 0.5
        assert len((embedding @ router.T).topk(2).indices.sort().values.unique(dim=0)) == 6


def test_unknown_kind_and_bad_seed_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=", ".join(TINY_KINDS) + ", got 'gpt'"):
        make_tiny_model("gpt", tmp_path)
    with pytest.raises(OptionError, match="seed"):
        make_tiny_model("llama", tmp_path, seed=-1)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OptionError, match=r"notes\.txt"):
        make_tiny_model("llama", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(OptionError, match="got the file"):
        make_tiny_model("llama", tmp_path / "notes.txt")


def test_a_tiny_model_is_replaced_by_another_kind(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    make_tiny_model("qwen3", tmp_path)
    assert _config(tmp_path)["architectures"] == ["Qwen3ForCausalLM"]
    assert any("q_norm" in name for name in load_file(tmp_path / "model.safetensors"))


def test_answers_end_with_im_end(tiny_folder: FolderOf) -> None:
    from tokenizers import Tokenizer

    folder = tiny_folder("llama")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert read_end_token_ids(folder) == {tokenizer.token_to_id("<|im_end|>")}
