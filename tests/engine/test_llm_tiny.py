"""The API on a real tiny model: everything from a folder to text, and every way a folder can be bad."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from dalsegno import LLM, SamplingParams
from dalsegno.errors import CheckpointError, OptionError, RequestError
from dalsegno.models.tiny import TINY_KINDS
from tests.matrix.tiny_models import tiny_model

KIND = "qwen3-next"
SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 64 * 2**20, "max_model_len": 1024, "threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TEXT = "def main() -> None:\n    print('über', 42)\n" * 8


def _copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model(KIND), tmp_path / "model"))


@pytest.fixture(scope="module", params=TINY_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Every kind of tiny model in turn, for what depends on the model."""
    return str(request.param)


@pytest.fixture(scope="module")
def llm(kind: str) -> Any:
    with LLM(tiny_model(kind), debug=True, **SMALL) as made:
        yield made


def test_text_in_text_out(llm: LLM) -> None:
    (output,) = llm.generate(TEXT, GREEDY)
    tokenizer = llm.get_tokenizer()
    assert output.prompt_token_ids == tokenizer(TEXT)["input_ids"]
    assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
    assert len(output.outputs[0].token_ids) == 8


def test_a_hit_gives_the_answer_of_a_cold_run(llm: LLM, kind: str) -> None:
    with LLM(tiny_model(kind), enable_prefix_caching=False, **SMALL) as cold:
        for prompt in (TEXT, TEXT + "x", TEXT + "\nfoo" * 9):
            expected, (found,) = cold.generate(prompt, GREEDY)[0], llm.generate(prompt, GREEDY)
            assert found.outputs[0].token_ids == expected.outputs[0].token_ids
            assert expected.num_cached_tokens == 0
    assert found.num_cached_tokens
    assert found.metrics.num_prefilled_tokens == len(found.prompt_token_ids) - found.num_cached_tokens


def test_samples_differ_and_repeat_with_their_seed(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, n=4, max_tokens=6, seed=-5, top_k=5000, top_p=0.95, ignore_eos=True)
    first, second = (llm.generate(TEXT, params)[0] for _ in range(2))
    assert [a.token_ids for a in first.outputs] == [a.token_ids for a in second.outputs]
    assert len({tuple(answer.token_ids) for answer in first.outputs}) > 1


def test_a_chat_with_tools_hits_its_own_turns(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Where is the key? " * 8}]
    (first,) = llm.chat(messages, GREEDY, tools=tools)
    assert first.prompt is not None
    assert '"look"' in first.prompt
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "door"}'}}
    messages += [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "no key"}]
    (second,) = llm.chat(messages, GREEDY, tools=tools)
    assert second.prompt is not None
    assert '{"at": "door"}' in second.prompt
    assert second.num_cached_tokens == len(first.prompt_token_ids) // 16 * 16


def test_the_start_up_plan_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dalsegno"), LLM(tiny_model(KIND), **SMALL) as llm:
        assert llm.start_up_plan in caplog.text
    assert f"loading {tiny_model(KIND)}: float32 on cpu, up to 1024 tokens" in caplog.text


BAD_PROMPTS: list[tuple[Any, dict[str, Any]]] = [
    ("", {}),
    ([], {}),
    ([1] * 1024, {}),
    ([4096], {}),
    ([-1], {}),
    ("x", {"temperature": float("nan")}),
    ("x", {"temperature": float("inf")}),
]


def test_after_bad_input_the_same_engine_answers_as_before(llm: LLM) -> None:
    llm.reset_prefix_cache()
    (before,) = llm.generate(TEXT, GREEDY)
    for prompt, given in BAD_PROMPTS:
        with pytest.raises((RequestError, OptionError)):
            llm.generate([TEXT, prompt], SamplingParams(max_tokens=2, **given))
        llm.verify()
        llm.reset_prefix_cache()
        (after,) = llm.generate(TEXT, GREEDY)
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
        llm.verify()


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(CheckpointError, match="there is no model folder /no/such"):
        LLM("/no/such/folder")


@pytest.mark.parametrize("model", ["", 5, None])
def test_what_is_no_model_name_is_refused(model: Any) -> None:
    with pytest.raises(CheckpointError, match=f"model must be a folder or a hub id, got {model!r}"):
        LLM(model)


def test_an_architecture_that_is_not_supported_is_named_before_anything_else_is_read(tmp_path: Path) -> None:
    folder = _copy(tmp_path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}), encoding="utf-8")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="GPT2LMHeadModel"):
        LLM(folder, **SMALL)


def test_a_missing_tokenizer_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    folder = _copy(tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer .*skip_tokenizer_init=True"):
        LLM(folder, **SMALL)
    with LLM(folder, skip_tokenizer_init=True, **SMALL) as without:
        assert len(without.generate([5, 6, 7], GREEDY)[0].outputs[0].token_ids) == 8
    with LLM(folder, tokenizer=tiny_model(KIND), **SMALL) as elsewhere:
        assert elsewhere.generate("fox", GREEDY)[0].outputs[0].text


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = _copy(tmp_path)
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer in .* cannot be read"):
        LLM(folder, **SMALL)


def test_a_corrupt_weights_file_is_named(tmp_path: Path) -> None:
    folder = _copy(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: 10**6])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        LLM(folder, **SMALL)


def test_defaults_of_the_generation_config_are_used(tmp_path: Path) -> None:
    folder = _copy(tmp_path)
    file = folder / "generation_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(
        json.dumps(config | {"temperature": 0.0, "max_new_tokens": 3, "eos_token_id": [2, 5000]}), encoding="utf-8"
    )
    with LLM(folder, **SMALL) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=3)
        assert len(llm.generate(TEXT)[0].outputs[0].token_ids) <= 3
        # An end token beyond the vocabulary can neither be sampled nor forbidden.
        assert len(llm.generate(TEXT, SamplingParams(min_tokens=2, max_tokens=2))[0].outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"block_size": 24}, "multiple of hash_block_size=16"),
        ({"kv_cache_memory_bytes": 1000}, "kv_cache_memory_bytes"),
        ({"kv_cache_memory_bytes": 4 * 2**20, "max_model_len": 32768}, "max_model_len"),
        ({"max_model_len": 32769}, "at most the model's length of 32768"),
        ({"device": "cuda:99"}, "device='cuda:99' is not there"),
    ],
)
def test_an_option_that_does_not_fit_is_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        LLM(tiny_model(KIND), **(SMALL | options))


def test_half_precision_runs() -> None:
    with LLM(tiny_model(KIND), dtype="bfloat16", **SMALL) as half:
        assert len(half.generate(TEXT, GREEDY)[0].outputs[0].token_ids) == 8
