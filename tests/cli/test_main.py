"""The command as a whole: quick help, one-line errors, status 2 for a user's mistake."""

import subprocess
import sys

import pytest

import dalsegno
from tests.cli.stand_in import Engines, run

COMMANDS = ["generate", "chat", "make-tiny-model", "demo"]


def test_help_names_every_command_and_every_command_has_help() -> None:
    overview = run("--help")
    assert overview.exit_code == 0
    for command in COMMANDS:
        assert command in overview.stdout
        assert run(command, "--help").exit_code == 0


def test_version_is_the_packages() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"dalsegno {dalsegno.__version__}\n")


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys\nfrom dalsegno.cli.main import app\n"
        "try:\n    app(['generate', '--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'safetensors', 'numpy'} & sys.modules.keys()\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "/no/such/folder", "-p", "x"], "there is no model folder /no/such/folder"),
        (["generate", "m", "-p", "x", "--block-size", "24"], "block_size must be a multiple of hash_block_size=16"),
        (["generate", "m", "-p", "x", "--temperature", "nan"], "temperature must be a finite number"),
        (["generate", "m", "-p", "x", "--tensor-parallel-size", "2"], "does not support tensor_parallel_size=2"),
        (["generate", "m", "-p", "x", "--trust-remote-code"], "does not support trust_remote_code=True"),
        (["chat", "m", "--n", "2"], "n must be 1"),
        (["make-tiny-model", "gpt", "some-folder"], "kind must be one of"),
    ],
)
def test_a_users_mistake_is_one_line_on_stderr_and_status_2(arguments: list[str], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("dalsegno: error: ")
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "m", "-p", "x", "--blok-size", "3"], "--block-size"),
        (["generate", "m"], "--prompt"),
        (["generate", "m", "-p", "x", "--block-size", "many"], "Invalid value for '--block-size'"),
        (["generat"], "generat"),
    ],
)
def test_a_mistyped_command_line_is_status_2_and_says_what(arguments: list[str], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_engine_error_is_one_line_and_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from dalsegno.errors import EngineError

    engines = Engines(monkeypatch)

    def stall(*_: object) -> None:
        raise EngineError("nothing can run")

    monkeypatch.setattr("dalsegno.engine.front_end.FrontEnd.step", stall)
    result = run("generate", "m", "-p", "fox")
    assert engines.models == ["m"]
    assert (result.exit_code, result.stderr) == (1, "dalsegno: engine error: nothing can run\n")
