"""The demo: the same answers with caching off and on, and a non-zero end if not."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from dalsegno.cli.conversations import TRACES_VARIABLE, load_conversation
from dalsegno.cli.demo import compare_turns, report
from dalsegno.engine.llm import LLM
from dalsegno.testing.faults import plant
from tests.cli.stand_in import Engines, run
from tests.matrix.tiny_models import tiny_model


@pytest.fixture
def _no_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRACES_VARIABLE, raising=False)


@pytest.fixture
def _made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the demo use the tiny model that other tests share instead of making its own."""
    made = tiny_model("qwen3-next")
    monkeypatch.setattr("dalsegno.models.tiny.make_tiny_model", lambda kind, path: path.symlink_to(made))


def _spoiled(model: Any, *, fault: str = "state_zeroed_at_hit", **options: Any) -> LLM:
    """An LLM that goes on from a wrong state at every hit."""
    llm = LLM(model, **options)
    plant(llm.core, fault)
    return llm


def _with_short_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages the way a trace writes their tool calls."""
    return [
        message | {"tool_calls": [call["function"] for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _stand_in(monkeypatch: pytest.MonkeyPatch, factory: Any = LLM) -> Any:
    monkeypatch.setattr("tests.engine.stand_in.MODEL_LENGTH", 20_000)
    monkeypatch.setattr("tests.engine.stand_in.NUM_SLABS", 4_000)
    Engines(monkeypatch)
    return functools.partial(factory, "stand-in")


def test_turns_hit_what_the_turns_before_them_left(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = load_conversation(environment={})
    turns = compare_turns(_stand_in(monkeypatch), conversation, 4)
    assert len(turns) == len(conversation.turns())
    assert all(turn.same_answer for turn in turns)
    for number, turn in enumerate(turns):
        num_prompt = len(turn.warm.prompt_token_ids)
        assert turn.cold.prompt_token_ids == turn.warm.prompt_token_ids
        assert turn.cold.num_cached_tokens == 0
        assert turn.warm.num_cached_tokens is not None
        assert turn.warm.metrics.num_prefilled_tokens == num_prompt - turn.warm.num_cached_tokens
        before = len(turns[number - 1].warm.prompt_token_ids) if number else 0
        # All but the last unit of the prompt before, which ended in the opening of an answer.
        assert turn.warm.num_cached_tokens >= before - 32


def test_the_table_says_for_every_turn_what_was_computed_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = load_conversation(environment={})
    turns = compare_turns(_stand_in(monkeypatch), conversation, 4)
    assert report(conversation, turns) == 0
    printed = capsys.readouterr().out
    for turn in turns:
        metrics = turn.warm.metrics
        row = [len(turn.warm.prompt_token_ids), turn.warm.num_cached_tokens, metrics.num_prefilled_tokens]
        assert any(
            [cell.strip() for cell in line.split("│")][2:5] == list(map(str, row)) for line in printed.split("\n")
        )
        assert turn.warm.hit_report is not None
        for reason, num_tokens in turn.warm.hit_report.lost.items():
            assert f"{reason} {num_tokens}" in printed
    assert "Every answer is the same" in printed


@pytest.mark.parametrize("fault", ["neighbours_state", "state_zeroed_at_hit"])
def test_a_wrong_state_at_a_hit_makes_the_report_fail(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = load_conversation(environment={})
    # The stand-in answers wrongly to the first and fails at the second; neither is the same answer.
    turns = compare_turns(_stand_in(monkeypatch, functools.partial(_spoiled, fault=fault)), conversation, 4)
    assert report(conversation, turns) == 1
    assert "this must not happen" in " ".join(capsys.readouterr().out.split())


def test_two_failures_are_not_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any, **options: Any) -> LLM:
        llm = LLM(*arguments, **options)

        def fail(_plan: Any) -> None:
            raise ValueError("broken")

        worker: Any = llm.core.worker
        worker.before_step = fail
        return llm

    turns = compare_turns(_stand_in(monkeypatch, failing), load_conversation(environment={}), 4)
    assert not any(turn.same_answer for turn in turns)


@pytest.mark.slow
@pytest.mark.usefixtures("_no_traces", "_made_before")
def test_the_demo_ends_well() -> None:
    result = run("demo", "--max-tokens", "4")
    assert result.exit_code == 0, result.stdout
    assert "Every answer is the same" in result.stdout
    rows = [line for line in result.stdout.split("\n") if "after a restart" in line or "behind a producer" in line]
    from_store = [int(row.split("│")[3]) for row in rows]
    assert len(rows) == 4
    assert all(from_store), "a process found nothing in the store"


@pytest.mark.slow
@pytest.mark.usefixtures("_made_before")
def test_the_demo_ends_non_zero_when_a_state_is_spoiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sample = load_conversation(environment={})
    head = {"system": sample.messages[0]["content"], "tools": sample.tools}
    record = {"session": "the opening of the sample", "messages": _with_short_calls(sample.messages[1:9])}
    (tmp_path / "tau-bench").mkdir()
    file = tmp_path / "tau-bench" / "short.sessions.jsonl"
    file.write_text(f"{json.dumps(head)}\n{json.dumps(record)}\n", encoding="utf-8")
    monkeypatch.setenv(TRACES_VARIABLE, str(tmp_path))
    assert run("demo").exit_code == 0
    monkeypatch.setattr("dalsegno.engine.llm.LLM", _spoiled)
    result = run("demo")
    assert result.exit_code == 1
    assert "answers differ: this must not happen" in " ".join(result.stdout.split())
    assert "NO" in result.stdout
