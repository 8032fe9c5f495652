"""What the demo plays: the sample that ships, or a recorded conversation."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from dalsegno.cli.conversations import TRACES_VARIABLE, load_conversation
from dalsegno.engine.chat import parse_conversation
from dalsegno.errors import RequestError


def _write_trace(folder: Path, conversations: list[list[dict[str, Any]]]) -> dict[str, str]:
    head = {"system": "Be brief.", "tools": [{"type": "function", "function": {"name": "f"}}]}
    lines = [head, *({"session": f"s{i}", "messages": messages} for i, messages in enumerate(conversations))]
    (folder / "tau-bench").mkdir()
    file = folder / "tau-bench" / "x.sessions.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return {TRACES_VARIABLE: str(folder)}


TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": '{"x": 1}'}]},
    {"role": "tool", "content": "r"},
    {"role": "assistant", "content": "b"},
]


def test_the_sample_is_a_conversation_with_tools_of_several_turns() -> None:
    conversation = load_conversation(environment={})
    parse_conversation(conversation.messages, conversation.tools)
    roles = [message["role"] for message in conversation.messages]
    assert roles[0] == "system"
    assert roles.count("assistant") >= 8
    offered = {tool["function"]["name"] for tool in conversation.tools}
    called = {call["function"]["name"] for message in conversation.messages for call in message.get("tool_calls") or ()}
    assert called == offered
    # Every call is answered by the message behind it.
    assert all(roles[i + 1] == "tool" for i, m in enumerate(conversation.messages) if m.get("tool_calls"))


def test_a_turn_is_everything_before_an_answer() -> None:
    conversation = load_conversation(environment={})
    turns = conversation.turns()
    for earlier, later in itertools.pairwise(turns):
        assert later[: len(earlier)] == earlier
        assert later[len(earlier)]["role"] == "assistant"


def test_a_recorded_conversation_is_taken_from_the_folder_that_is_named(tmp_path: Path) -> None:
    environment = _write_trace(tmp_path, [[{"role": "user", "content": "z"}], TALK])
    conversation = load_conversation(1, environment)
    assert conversation.messages[0] == {"role": "system", "content": "Be brief."}
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    assert conversation.messages[2]["tool_calls"] == [call]
    assert [len(turn) for turn in conversation.turns()] == [2, 4]
    assert conversation.name == "s1 of x.sessions.jsonl"


def test_a_folder_without_conversations_gives_the_sample_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_conversation(0, {}).name == "the sample conversation"
    assert not caplog.text
    assert load_conversation(0, {TRACES_VARIABLE: str(tmp_path)}).name == "the sample conversation"
    assert f"{TRACES_VARIABLE}={tmp_path} holds no" in caplog.text


def test_a_conversation_that_is_not_there_is_a_users_error(tmp_path: Path) -> None:
    environment = _write_trace(tmp_path, [TALK])
    with pytest.raises(RequestError, match=r"^\S+ has no conversation 1"):
        load_conversation(1, environment)
    with pytest.raises(RequestError, match=f"no conversation 1: without {TRACES_VARIABLE}"):
        load_conversation(1, {})
    (tmp_path / "tau-bench" / "x.sessions.jsonl").write_text("{}\n[]\n", encoding="utf-8")
    with pytest.raises(RequestError, match="no file of recorded conversations"):
        load_conversation(0, environment)


def test_every_recorded_conversation_can_be_rendered(traces_folder: Path) -> None:
    conversation = load_conversation(0, {TRACES_VARIABLE: str(traces_folder)})
    assert parse_conversation(conversation.messages, conversation.tools).tools
    assert len(conversation.turns()) > 3
