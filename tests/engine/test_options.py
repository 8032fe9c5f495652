"""Engine options: one definition, strict about what it is given."""

import dataclasses
import inspect
import math
from typing import Any

import pytest

from dalsegno.config import CacheConfig
from dalsegno.engine.foreign_options import FOREIGN_OFF_VALUES, OURS_INSTEAD
from dalsegno.engine.llm import LLM
from dalsegno.engine.options import EngineOptions, option_specs
from dalsegno.errors import OptionError


def test_defaults_are_the_documented_ones() -> None:
    documented = {
        "block_size": 16,
        "hash_block_size": 16,
        "max_model_len": None,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 256,
        "kv_cache_memory_bytes": None,
        "enable_prefix_caching": True,
        "prefix_cache_retention_interval": 0,
        "decode_checkpoint_interval": None,
        "max_states_per_request": 16,
        "dtype": "auto",
        "device": "auto",
        "seed": 0,
        "threads": None,
    }
    defaults = {spec.name: spec.default for spec in option_specs()}
    assert documented.items() <= defaults.items()


def test_the_signature_of_llm_is_made_from_the_same_definition() -> None:
    parameters = inspect.signature(LLM).parameters
    assert [name for name in parameters if name != "model"] == [spec.name for spec in option_specs()]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for name, p in parameters.items() if name != "model")


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("block_size", 0),
        ("block_size", True),
        ("block_size", 16.0),
        ("hash_block_size", -16),
        ("max_model_len", 0),
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", "many"),
        ("kv_cache_memory_bytes", -1),
        ("kv_cache_memory_bytes", 1.5e9),
        ("enable_prefix_caching", 1),
        ("enable_prefix_caching", None),
        ("prefix_cache_retention_interval", None),
        ("prefix_cache_retention_interval", 24),
        ("decode_checkpoint_interval", 7),
        ("max_states_per_request", -1),
        ("scheduling_policy", "lifo"),
        ("prefix_wait_steps", -1),
        ("dtype", "float64"),
        ("dtype", ["float32"]),
        ("device", "tpu"),
        ("device", "cuda:x"),
        ("seed", -1),
        ("seed", math.nan),
        ("threads", 0),
        ("native_kernels", 1),
        ("tokenizer", ""),
        ("skip_tokenizer_init", "yes"),
        ("debug", 0),
        ("verify_prefix_cache", 1.5),
        ("verify_prefix_cache", -0.1),
        ("verify_prefix_cache", True),
        ("verify_prefix_cache", math.nan),
        ("verify_prefix_cache", "all"),
        ("verify_dump_dir", 3),
        ("verify_dump_dir", "without-a-share"),
    ],
)
def test_a_bad_value_is_refused_with_the_name_and_what_was_given(name: str, bad: Any) -> None:
    with pytest.raises(OptionError) as caught:
        EngineOptions.from_keywords({name: bad})
    assert name in str(caught.value)
    assert str(bad) in str(caught.value)


@pytest.mark.parametrize(("unit", "block"), [(16, 24), (16, 8), (64, 16), (3, 16)])
def test_a_block_that_is_no_multiple_of_the_unit_is_refused_with_both_values(unit: int, block: int) -> None:
    with pytest.raises(OptionError, match=rf"block_size.*hash_block_size={unit}.*{block}"):
        EngineOptions.from_keywords({"block_size": block, "hash_block_size": unit})


def test_vllms_name_of_the_unit_is_accepted_and_a_conflict_is_not() -> None:
    assert EngineOptions.from_keywords({"block_size": 64, "prefix_match_unit": 32}).hash_block_size == 32
    assert EngineOptions.from_keywords({"prefix_match_unit": None}).hash_block_size == 16
    both = {"block_size": 64, "hash_block_size": 32}
    assert EngineOptions.from_keywords(both | {"prefix_match_unit": 32}).hash_block_size == 32
    with pytest.raises(OptionError, match="prefix_match_unit=16 and hash_block_size=32"):
        EngineOptions.from_keywords(both | {"prefix_match_unit": 16})
    with pytest.raises(OptionError, match="prefix_match_unit must be an integer"):
        EngineOptions.from_keywords({"prefix_match_unit": "16"})


def test_every_off_value_of_a_foreign_option_changes_nothing() -> None:
    for name, values in FOREIGN_OFF_VALUES.items():
        for value in values:
            assert EngineOptions.from_keywords({name: value}) == EngineOptions(), (name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", 2),
        ("pipeline_parallel_size", 4),
        ("trust_remote_code", True),
        ("quantization", "fp8"),
        ("speculative_config", {"method": "ngram"}),
        ("enable_lora", True),
        ("gpu_memory_utilization", 0.5),
        ("kv_cache_dtype", "fp8"),
        ("load_format", "gguf"),
        ("enable_chunked_prefill", False),
        ("cpu_offload_gb", 4),
        ("revision", "main"),
    ],
)
def test_a_foreign_option_that_asks_for_something_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        EngineOptions.from_keywords({name: value})
    assert f"{name}={value!r}" in str(caught.value)
    assert f"only {name}=" in str(caught.value)


def test_a_refused_option_names_ours_that_does_the_same() -> None:
    with pytest.raises(OptionError, match=r"gpu_memory_utilization=0\.5.*; use kv_cache_memory_bytes$"):
        EngineOptions.from_keywords({"gpu_memory_utilization": 0.5})
    assert OURS_INSTEAD.keys() <= FOREIGN_OFF_VALUES.keys()


def test_no_option_of_ours_is_in_the_foreign_list() -> None:
    assert not {spec.name for spec in option_specs()} & FOREIGN_OFF_VALUES.keys()


@pytest.mark.parametrize(
    ("typo", "nearest"),
    [("blocksize", "block_size"), ("max_len", "max_model_len"), ("tensor_parallel", "tensor_parallel_size")],
)
def test_an_unknown_option_is_refused_with_the_nearest_valid_name(typo: str, nearest: str) -> None:
    with pytest.raises(OptionError, match=f"no option '{typo}'; did you mean {nearest}"):
        EngineOptions.from_keywords({typo: 1})


def test_an_unknown_option_like_none_of_ours_gets_all_names() -> None:
    with pytest.raises(OptionError, match="no option 'watermark'; valid names: block_size, debug"):
        EngineOptions.from_keywords({"watermark": 1})


def test_none_is_filled_in_from_the_model_and_the_unit() -> None:
    options = EngineOptions(block_size=32, hash_block_size=32)
    assert options.scheduler_config(4096).max_model_len == 4096
    assert options.cache_config() == CacheConfig(block_size=32, hash_block_size=32, decode_checkpoint_interval=32)
    assert EngineOptions(decode_checkpoint_interval=0).cache_config().decode_checkpoint_interval == 0


def test_a_length_beyond_the_models_is_refused() -> None:
    assert EngineOptions(max_model_len=100).scheduler_config(100).max_model_len == 100
    with pytest.raises(OptionError, match="max_model_len must be at most the model's length of 100 tokens, got 101"):
        EngineOptions(max_model_len=101).scheduler_config(100)


def test_a_dtype_is_named_by_text_alias_or_torch_dtype() -> None:
    import torch

    assert EngineOptions.from_keywords({"dtype": torch.bfloat16}).dtype_name == "bfloat16"
    assert EngineOptions(dtype="half").dtype_name == "float16"
    assert EngineOptions().dtype_name == "auto"


def test_options_cannot_be_changed() -> None:
    options = EngineOptions()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.block_size = 32  # type: ignore[misc]
