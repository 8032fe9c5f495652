"""Every engine option is a flag, with the same meaning; nothing is listed twice."""

import dataclasses
from typing import Any

import pytest

from dalsegno.cli.flags import SAMPLING_FLAGS
from dalsegno.engine.options import EngineOptions, option_specs
from dalsegno.sampling_params import SamplingParams
from tests.cli.stand_in import Engines, run

OTHER_VALUES: dict[str, Any] = {
    "block_size": 64,
    "hash_block_size": 8,
    "max_model_len": 300,
    "max_num_batched_tokens": 100,
    "max_num_seqs": 3,
    "kv_cache_memory_bytes": 10**8,
    "enable_prefix_caching": False,
    "prefix_cache_retention_interval": 32,
    "decode_checkpoint_interval": 48,
    "max_states_per_request": 5,
    "scheduling_policy": "fcfs",
    "prefix_wait_steps": 7,
    "dtype": "bfloat16",
    "device": "cpu",
    "seed": 9,
    "threads": 1,
    "native_kernels": False,
    "tokenizer": "folder",
    "skip_tokenizer_init": True,
    "kv_store": "folder",
    "kv_store_bytes": 2**30,
    "kv_transfer_config": '{"kv_connector": "NullConnector"}',
    "kv_load_timeout_s": 1.5,
    "kv_job_timeout_s": 2.5,
    "kv_close_timeout_s": 3.5,
    "verify_prefix_cache": 0.5,
    "verify_dump_dir": "folder",
    "debug": True,
}


def _flag(name: str, value: Any) -> list[str]:
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{dashed}" if value else f"--no-{dashed}"]
    return [f"--{dashed}", str(value)]


def test_every_option_has_a_value_to_test_with() -> None:
    assert OTHER_VALUES.keys() == {spec.name for spec in option_specs()}
    assert all(OTHER_VALUES[spec.name] != spec.default for spec in option_specs())


NOT_ALONE = ("skip_tokenizer_init", "kv_store_bytes", "verify_dump_dir")


@pytest.mark.parametrize("name", [name for name in OTHER_VALUES if name not in NOT_ALONE])
@pytest.mark.parametrize("command", [["generate", "m", "-p", "fox", "--max-tokens", "1"], ["chat", "m"]])
def test_a_flag_sets_its_option_and_no_other(name: str, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch)
    result = run(*command, *_flag(name, OTHER_VALUES[name]), stdin="")
    assert result.exit_code == 0, result.stderr
    assert engines.models == ["m"]
    assert engines.options == [EngineOptions(**{name: OTHER_VALUES[name]})]


@pytest.mark.parametrize("command", [["generate", "m", "-p", "fox"], ["chat", "m"]])
def test_a_command_needs_a_tokenizer(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch)
    result = run(*command, "--skip-tokenizer-init")
    assert result.exit_code == 2
    assert "skip_tokenizer_init must be off" in result.stderr
    assert engines.models == []
    assert "skip-tokenizer-init" not in run(command[0], "--help").stdout


def test_vllms_name_of_the_unit_is_a_flag_and_a_conflict_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch)
    run("chat", "m", "--prefix-match-unit", "8", stdin="")
    assert engines.options == [EngineOptions(hash_block_size=8)]
    result = run("chat", "m", "--prefix-match-unit", "8", "--hash-block-size", "16")
    assert result.exit_code == 2
    assert "two names of one option" in result.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ["--tensor-parallel-size", "1"],
        ["--enforce-eager"],
        ["--no-enforce-eager"],
        ["--enable-chunked-prefill"],
        ["--no-trust-remote-code"],
        ["--quantization", "none"],
        ["--kv-cache-dtype", "auto"],
        ["--gpu-memory-utilization", "0.9"],
        ["--hf-overrides", "{}"],
    ],
)
def test_foreign_flags_at_their_off_value_change_nothing(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch)
    result = run("chat", "m", *flags, stdin="")
    assert result.exit_code == 0, result.stderr
    assert engines.options == [EngineOptions()]


def test_foreign_flags_are_not_in_the_help() -> None:
    text = run("generate", "--help").stdout
    assert "--block-size" in text
    assert "tensor-parallel" not in text
    assert "prefix-match-unit" not in text


def test_sampling_flags_are_the_sampling_parameters() -> None:
    # The engine's --seed fixes everything a command samples, and no command prints log-probabilities.
    others = {"seed", "logprobs", "prompt_logprobs"}
    assert SAMPLING_FLAGS.keys() == {field.name for field in dataclasses.fields(SamplingParams)} - others


def test_biases_are_written_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(monkeypatch)
    seen: list[SamplingParams] = []
    engines.before_step = lambda plan: seen.extend(part.sample.params for part in plan.requests if part.sample)
    command = ["generate", "m", "-p", "fox", "--max-tokens", "1", "--min-p", "0.25", "--logit-bias"]
    assert run(*command, '{"5": 1.5, "7": -200}').exit_code == 0
    assert [(params.logit_bias, params.min_p) for params in seen] == [({5: 1.5, 7: -100.0}, 0.25)]
    result = run(*command, "5=1.5")
    assert result.exit_code == 2
    assert "logit_bias must be a dict" in result.stderr
