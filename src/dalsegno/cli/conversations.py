"""Recorded conversations the demo can play: the sample that ships here, or one of a folder of traces."""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from dalsegno.errors import RequestError

__all__ = ["TRACES_VARIABLE", "RecordedConversation", "load_conversation"]

TRACES_VARIABLE = "DALSEGNO_TRACES"
"""Names a folder of recorded conversations; `tau-bench/*.sessions.jsonl` in it is read."""

_log = logging.getLogger(__name__)

_SAMPLE = "sample_conversation.json"
_PATTERN = "tau-bench/*.sessions.jsonl"


@dataclass(frozen=True, slots=True)
class RecordedConversation:
    """A conversation with the answers it had, and the tools that were offered."""

    name: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]

    def turns(self) -> list[list[dict[str, Any]]]:
        """Return, for every answer of the record, the messages that led to it."""
        return [self.messages[:i] for i, message in enumerate(self.messages) if i and message["role"] == "assistant"]


def load_conversation(session: int = 0, environment: Mapping[str, str] | None = None) -> RecordedConversation:
    """Return conversation `session` of the trace folder where one is named and holds any, else the sample.

    A trace file holds system prompt and tools in its first line and one conversation in each other line. A folder that
    is named and holds none is logged as a warning.

    Raises:
        RequestError: the file cannot be read, or there is no such conversation.
    """
    folder = (os.environ if environment is None else environment).get(TRACES_VARIABLE)
    found = sorted(Path(folder).glob(_PATTERN)) if folder else []
    if not found:
        if folder:
            _log.warning("%s=%s holds no %s; the sample is played instead", TRACES_VARIABLE, folder, _PATTERN)
        if session:
            raise RequestError(
                f"there is no conversation {session}: without {TRACES_VARIABLE} there is only the sample, 0"
            )
        return _sample()
    try:
        conversation = _recorded(found[0], session)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            f"{found[0]} is no file of recorded conversations: {type(error).__name__}: {error}"
        ) from error
    if conversation is None:
        raise RequestError(f"{found[0]} has no conversation {session}; it ends before")
    return conversation


def _sample() -> RecordedConversation:
    content = json.loads(files("dalsegno.cli").joinpath(_SAMPLE).read_text(encoding="utf-8"))
    return RecordedConversation("the sample conversation", content["messages"], content["tools"])


def _recorded(file: Path, session: int) -> RecordedConversation | None:
    with file.open(encoding="utf-8") as lines:
        head = json.loads(next(lines))
        line = next(islice(lines, session, None), None)
    if line is None:
        return None
    record = json.loads(line)
    opening = {"role": "system", "content": head["system"]}
    messages = [opening, *(_as_chat_message(message) for message in record["messages"])]
    return RecordedConversation(f"{record['session']} of {file.name}", messages, head["tools"])


def _as_chat_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Write the trace's short form of tool calls (name and arguments) the way chat messages have them."""
    found = dict(message)
    if found.get("tool_calls"):
        found["tool_calls"] = [
            {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in found["tool_calls"]
        ]
    return found
