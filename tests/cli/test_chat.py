"""`dalsegno chat`: turns, commands, and a Ctrl-C that stops an answer only."""

import os
import signal
from typing import Any

import pytest

from dalsegno.engine.llm import LLM
from dalsegno.sampling_params import SamplingParams
from tests.cli.stand_in import Engines, run

GREEDY = ["--temperature", "0", "--ignore-eos", "--max-tokens", "6"]
PARAMS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=6, top_k=7)


@pytest.fixture
def conversations(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, Any]]]:
    """The messages of every turn the command sends."""
    seen: list[list[dict[str, Any]]] = []
    original = LLM.stream_chat

    def record(self: LLM, messages: Any, *arguments: Any, **settings: Any) -> Any:
        seen.append([dict(message) for message in messages])
        return original(self, messages, *arguments, **settings)

    monkeypatch.setattr(LLM, "stream_chat", record)
    return seen


def test_turns_build_on_each_other(monkeypatch: pytest.MonkeyPatch, conversations: list[Any]) -> None:
    engines = Engines(monkeypatch)
    result = run("chat", "m", "--system", "You are a fox.", *GREEDY, stdin="Where is the dog?\n\nAnd now?\n/quit\n")
    assert result.exit_code == 0
    system, question = {"role": "system", "content": "You are a fox."}, {"role": "user", "content": "Where is the dog?"}
    (first,) = engines.reference().chat([system, question], PARAMS)
    answer = {"role": "assistant", "content": first.outputs[0].text}
    assert conversations == [[system, question], [system, question, answer, {"role": "user", "content": "And now?"}]]
    (second,) = engines.reference().chat(conversations[1], PARAMS)
    assert result.stdout == f"{first.outputs[0].text}\n{second.outputs[0].text}\n"


def test_every_turn_says_what_was_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    Engines(monkeypatch)
    result = run("chat", "m", *GREEDY, stdin="The quick brown fox jumps over the lazy dog.\nAnd now?\n")
    notes = [line for line in result.stderr.splitlines() if "cached" in line]
    assert len(notes) == 2
    assert " 0 cached" in notes[0]
    assert " 0 cached" not in notes[1]


def test_reset_starts_over_behind_the_system_prompt(monkeypatch: pytest.MonkeyPatch, conversations: list[Any]) -> None:
    Engines(monkeypatch)
    run("chat", "m", "--system", "S", *GREEDY, stdin="one\n/reset\ntwo\n")
    assert [message["content"] for message in conversations[1]] == ["S", "two"]


def test_quit_and_the_end_of_input_end_the_program(monkeypatch: pytest.MonkeyPatch, conversations: list[Any]) -> None:
    engines = Engines(monkeypatch)
    assert run("chat", "m", *GREEDY, stdin="/quit\nnever\n").exit_code == 0
    assert run("chat", "m", *GREEDY, stdin="").exit_code == 0
    assert conversations == []
    assert all(worker.closed for worker in engines.workers)


def test_an_unknown_command_is_no_message(monkeypatch: pytest.MonkeyPatch, conversations: list[Any]) -> None:
    Engines(monkeypatch)
    result = run("chat", "m", *GREEDY, stdin="/rest now\n")
    assert "no command /rest" in result.stderr
    assert conversations == []


@pytest.mark.parametrize("in_the_worker", [True, False])
def test_an_interrupt_stops_the_answer_and_the_chat_goes_on(
    monkeypatch: pytest.MonkeyPatch, conversations: list[Any], *, in_the_worker: bool
) -> None:
    engines = Engines(monkeypatch)
    steps = iter(range(99))

    def interrupt(_plan: Any) -> None:
        if next(steps) == 3:
            if in_the_worker:
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGINT)

    engines.before_step = interrupt
    result = run("chat", "m", *GREEDY, stdin="Where is the dog?\nAnd now?\n")
    assert result.exit_code == 0
    assert "(stopped)" in result.stderr
    stopped = conversations[1][1]["content"]
    (whole,) = engines.reference().chat([{"role": "user", "content": "Where is the dog?"}], PARAMS)
    assert whole.outputs[0].text.startswith(stopped)
    assert 0 < len(stopped) < len(whole.outputs[0].text)
    (second,) = engines.reference().chat(conversations[1], PARAMS)
    assert result.stdout.endswith(f"{second.outputs[0].text}\n")


def test_a_conversation_that_got_too_long_is_said_and_survived(
    monkeypatch: pytest.MonkeyPatch, conversations: list[Any]
) -> None:
    Engines(monkeypatch)
    result = run("chat", "m", *GREEDY, "--max-model-len", "100", stdin=f"{'Zwölf Boxkämpfer ' * 40}\nfox\n")
    assert "error: messages has" in result.stderr
    assert conversations[1] == [{"role": "user", "content": "fox"}]
    assert result.exit_code == 0
