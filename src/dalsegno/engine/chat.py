"""Conversations: checked messages, their rendering, and the marks where a later turn can resume.

No template is special-cased. A mark is the end of what the rendering of the first few messages has in common with the
rendering of all of them, in tokens; so it is where every continuation of these messages agrees.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dalsegno.engine.tokenizer import EncodedText, Tokenizer
from dalsegno.errors import RequestError

__all__ = [
    "Conversation",
    "Message",
    "MessageLike",
    "RenderedConversation",
    "list_conversations",
    "parse_conversation",
    "render_conversation",
]

MessageLike = Mapping[str, Any]
"""A message as callers write it."""

Message = dict[str, Any]
"""A checked message, as templates read it."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Checked messages, the tools offered with them, and how the template is to write them."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    add_generation_prompt: bool = True
    template_options: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """A conversation as text and tokens; `marks` are ascending token counts at which its parts end."""

    text: str
    token_ids: list[int]
    marks: tuple[int, ...]


def list_conversations(messages: Any) -> list[Sequence[Mapping[str, Any]]]:
    """Return the conversations as a list: a list of messages is one conversation by itself.

    Raises:
        RequestError: it is neither a list of messages nor a list of such lists.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise RequestError(f"messages must be a list of dicts, or a list of such lists, got {messages!r:.60}")
    found = list(messages)
    if not found or any(isinstance(item, Mapping) for item in found):
        return [found]
    return found


def parse_conversation(messages: Any, tools: Any = None, *, where: str = "messages", **rendering: Any) -> Conversation:
    """Return a checked conversation.

    Contents become plain text, and the arguments of tool calls become objects, which is what templates expect.

    Args:
        messages: a sequence of dicts with a `role`.
        tools: None, or a sequence of function schemas.
        where: what to call the messages in error messages.
        rendering: `add_generation_prompt` and `template_options` of `Conversation`.

    Raises:
        RequestError: something in it is not of the form a chat has.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise RequestError(f"{where} must be a list of dicts, got {messages!r:.60}")
    found = tuple(_message(message, f"{where}[{index}]") for index, message in enumerate(messages))
    if not found:
        raise RequestError(f"{where} is empty; a conversation has at least one message")
    if tools is not None and (isinstance(tools, str | Mapping) or not isinstance(tools, Iterable)):
        raise RequestError(f"tools must be a list of function schemas, got {tools!r:.60}")
    schemas = tuple(tools or ())
    for index, schema in enumerate(schemas):
        if not isinstance(schema, Mapping):
            raise RequestError(f"tools[{index}] must be a dict with a function schema, got {schema!r:.60}")
    conversation = Conversation(found, schemas, **rendering)
    _check_rendering(conversation)
    return conversation


def _check_rendering(conversation: Conversation) -> None:
    if not isinstance(conversation.add_generation_prompt, bool):
        raise RequestError(f"add_generation_prompt must be True or False, got {conversation.add_generation_prompt!r}")
    given = conversation.template_options
    if given is not None and not isinstance(given, Mapping):
        raise RequestError(f"chat_template_kwargs must be a dict of template variables, got {given!r:.60}")


def render_conversation(tokenizer: Tokenizer, conversation: Conversation, max_marks: int) -> RenderedConversation:
    """Render a conversation and find its marks.

    Args:
        tokenizer: of the model that will answer.
        conversation: checked messages.
        max_marks: as many message ends, counted from the last, are looked for; 0 finds none.

    Raises:
        RequestError: the template refuses the conversation.
    """
    messages = conversation.messages
    whole = tokenizer.encode_rendered(_render(tokenizer, conversation, messages, final=True))
    marks: set[int] = set()
    for part in _parts(messages, max_marks):
        try:
            rendered = _render(tokenizer, conversation, part, final=False)
        except RequestError:
            # Many templates refuse a conversation without a user; then there is no such end to resume from.
            continue
        marks.add(_common_tokens(tokenizer, whole, rendered))
    return RenderedConversation(whole.text, whole.token_ids, tuple(sorted(marks - {0})))


def _render(tokenizer: Tokenizer, conversation: Conversation, messages: Sequence[Message], *, final: bool) -> str:
    return tokenizer.render(
        messages,
        conversation.tools,
        add_generation_prompt=final and conversation.add_generation_prompt,
        template_options=conversation.template_options,
    )


def _parts(messages: Sequence[Message], max_marks: int) -> Iterator[Sequence[Message]]:
    """Yield the conversations to compare with the whole one: how it opens, which new sessions share, and its last ends.

    An empty conversation has no rendering. Where no system message opens this one, what comes before the first message
    (the tools) is found by comparing with a conversation that opens with another text.
    """
    if max_marks == 0:
        return
    if messages[0]["role"] != "system":
        yield [{**messages[0], "content": "y" if messages[0]["content"].startswith("x") else "x"}]
    for count in sorted({1} | set(range(max(1, len(messages) - max_marks + 1), len(messages) + 1))):
        yield messages[:count]


def _common_tokens(tokenizer: Tokenizer, whole: EncodedText, part: str) -> int:
    """Return the length of the common token prefix of a rendering and of one of its first few messages.

    Only what follows the last cut is tokenized again: everything before it has the same tokens in both.
    """
    start = tokenizer.last_cut(whole, _common_length(whole.text, part))
    first_char = whole.ends[start - 1] if start else 0
    again = tokenizer.encode_rendered(part[first_char:]).token_ids
    for offset, (left, right) in enumerate(zip(whole.token_ids[start:], again, strict=False)):
        if left != right:
            return start + offset
    return start + min(len(whole.token_ids) - start, len(again))


def _common_length(left: str, right: str) -> int:
    """Return the length of the common prefix of two texts, by bisection since comparing slices is fast."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left.startswith(right[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, Mapping):
        raise RequestError(f"{where} must be a dict with 'role' and 'content', got {given!r:.60}")
    message = dict(given)
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise RequestError(f"{where} must have a 'role' such as 'user', got {message.get('role')!r}")
    message["content"] = _content(message.get("content"), where)
    calls = message.get("tool_calls")
    if not calls:
        message.pop("tool_calls", None)
        return message
    if isinstance(calls, str | Mapping) or not isinstance(calls, Iterable):
        raise RequestError(f"{where}: tool_calls must be a list of dicts, got {calls!r:.60}")
    message["tool_calls"] = [_tool_call(call, where) for call in calls]
    return message


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Iterable) or isinstance(content, Mapping):
        raise RequestError(f"{where}: content must be a text or a list of text parts, got {content!r:.60}")
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            raise RequestError(f"{where}: only parts of type 'text' are supported, got {part!r:.60}")
        parts.append(text)
    return "\n".join(parts)


def _tool_call(call: Any, where: str) -> Message:
    if not isinstance(call, Mapping):
        raise RequestError(f"{where}: a tool call must be a dict, got {call!r:.60}")
    found = dict(call)
    if isinstance(found.get("function"), Mapping):
        found["function"] = _with_object_arguments(found["function"])
        return found
    return _with_object_arguments(found)


def _with_object_arguments(function: Mapping[str, Any]) -> Message:
    found = dict(function)
    if isinstance(found.get("arguments"), str):
        try:
            parsed = json.loads(found["arguments"])
        except ValueError:
            return found
        found["arguments"] = parsed if isinstance(parsed, dict) else found["arguments"]
    return found
