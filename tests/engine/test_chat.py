"""Conversations: checked, rendered by the checkpoint's template, and marked where a later turn can resume."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.engine.chat import list_conversations, parse_conversation, render_conversation
from dalsegno.engine.tokenizer import Tokenizer
from dalsegno.errors import RequestError
from tests.engine.stand_in import TEMPLATE, small_tokenizer

TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a fox."},
    {"role": "user", "content": "Where is the lazy dog?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "lookup", "arguments": '{"what": "dog"}'}}],
    },
    {"role": "tool", "content": '{"place": "über dem Deich"}'},
    {"role": "assistant", "content": "Over the dike. 🐕"},
    {"role": "user", "content": "敏捷的棕色狐狸?"},
]


def _common(left: list[int], right: list[int]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


def _oracle_marks(tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: Any) -> set[int]:
    """The definition: common token prefixes of the renderings of the first i messages with the whole rendering."""
    conversation = parse_conversation(messages, tools)
    whole = tokenizer.encode_rendered(tokenizer.render(conversation.messages, conversation.tools)).token_ids
    marks = set()
    for count in range(1, len(messages) + 1):
        part = tokenizer.render(conversation.messages[:count], conversation.tools, add_generation_prompt=False)
        marks.add(_common(whole, tokenizer.encode_rendered(part).token_ids))
    return marks - {0}


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE,
        # No special token between messages, and a border inside a word.
        "{%- for message in messages -%}{{ message.content }}{% endfor -%}{{ 'fox' if add_generation_prompt }}",
        # Only the last message is written in full.
        "{%- for message in messages -%}<|im_start|>{{ message.content if loop.last else 'x' }}<|im_end|>{% endfor -%}",
    ],
)
def test_marks_are_where_all_continuations_agree(template: str, tools: Any) -> None:
    tokenizer = small_tokenizer(template)
    rendered = render_conversation(tokenizer, parse_conversation(MESSAGES, tools), max_marks=16)
    assert set(rendered.marks) == _oracle_marks(tokenizer, MESSAGES, tools)
    assert list(rendered.marks) == sorted(rendered.marks)
    assert rendered.text == tokenizer.render(parse_conversation(MESSAGES).messages, tools)


@cache
def _tokenizer_of_merges() -> Tokenizer:
    """Tokens ab, bc and bcd of which the later letters are joined first, so that more text changes earlier tokens."""
    from tokenizers import Tokenizer as Raw
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["a", "b", "c", "d", "ab", "bc", "cd", "bcd"])}
    raw = Raw(models.BPE(vocabulary, [("c", "d"), ("b", "cd"), ("b", "c"), ("a", "b")]))
    raw.decoder = decoders.Fuse()
    backend = PreTrainedTokenizerFast(tokenizer_object=raw)
    backend.chat_template = "{%- for message in messages -%}{{ message.content }}{% endfor -%}"
    return Tokenizer(backend)


@given(st.lists(st.text(alphabet="abcd", min_size=1, max_size=5), min_size=1, max_size=5))
def test_marks_are_exact_where_messages_run_into_each_other(contents: list[str]) -> None:
    tokenizer = _tokenizer_of_merges()
    messages = [{"role": "system", "content": content} for content in contents]
    rendered = render_conversation(tokenizer, parse_conversation(messages), max_marks=16)
    assert set(rendered.marks) == _oracle_marks(tokenizer, messages, None)


def test_a_mark_at_the_end_of_each_message_makes_the_next_turn_a_prefix() -> None:
    tokenizer = small_tokenizer()
    first = render_conversation(tokenizer, parse_conversation(MESSAGES[:2], TOOLS), max_marks=16)
    later = render_conversation(tokenizer, parse_conversation(MESSAGES, TOOLS), max_marks=16)
    assert set(first.marks) <= set(later.marks)
    end = first.marks[-1]
    assert first.token_ids[:end] == later.token_ids[:end]


def test_of_a_long_conversation_the_opening_and_the_latest_ends_are_marked() -> None:
    tokenizer = small_tokenizer()
    messages = [MESSAGES[0], *([MESSAGES[1], MESSAGES[4]] * 20)]
    every = sorted(_oracle_marks(tokenizer, messages, TOOLS))
    rendered = render_conversation(tokenizer, parse_conversation(messages, TOOLS), max_marks=4)
    assert list(rendered.marks) == [every[0], *every[-4:]]
    assert render_conversation(tokenizer, parse_conversation(messages, TOOLS), max_marks=0).marks == ()


def test_tools_without_a_system_prompt_end_in_a_mark_that_any_question_shares() -> None:
    tokenizer = small_tokenizer()
    questions = [[{"role": "user", "content": text}] for text in ("xylophones?", "Where is the dog?", "狐狸")]
    rendered = [render_conversation(tokenizer, parse_conversation(messages, TOOLS), 16) for messages in questions]
    opening = tokenizer.render(parse_conversation(questions[0]).messages, TOOLS).split("xylophones?")[0]
    num_tokens = len(tokenizer.encode_rendered(opening).token_ids)
    assert [one.marks[0] for one in rendered] == [num_tokens] * 3


def test_a_template_that_refuses_the_opening_alone_costs_only_that_mark() -> None:
    template = (
        "{%- if messages | length < 2 %}{{ raise_exception('no user message') }}{% endif -%}"
        "{%- for message in messages -%}<|im_start|>{{ message.content }}<|im_end|>{% endfor -%}"
    )
    tokenizer = small_tokenizer(template)
    rendered = render_conversation(tokenizer, parse_conversation(MESSAGES[:3]), max_marks=16)
    assert len(rendered.marks) == 2, "after the second message and after the third"


def test_what_the_template_refuses_is_the_callers_error() -> None:
    refusing = small_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        render_conversation(refusing, parse_conversation(MESSAGES), 16)
    with pytest.raises(RequestError, match="no chat template"):
        render_conversation(small_tokenizer(None), parse_conversation(MESSAGES), 16)


def test_arguments_of_tool_calls_reach_the_template_as_objects() -> None:
    conversation = parse_conversation(MESSAGES)
    assert conversation.messages[2]["tool_calls"][0]["function"]["arguments"] == {"what": "dog"}
    assert conversation.messages[2]["content"] == ""
    assert '<call>lookup {"what": "dog"}</call>' in small_tokenizer().render(conversation.messages)
    flat = [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "no json"}]}]
    assert parse_conversation(flat).messages[0]["tool_calls"] == [{"name": "f", "arguments": "no json"}]


def test_the_callers_messages_are_not_changed() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    parse_conversation([message])
    assert message == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
    }


def test_text_parts_become_one_text() -> None:
    content = [{"type": "text", "text": "a"}, {"text": "b"}, "c"]
    assert parse_conversation([{"role": "user", "content": content}]).messages[0]["content"] == "a\nb\nc"


@pytest.mark.parametrize(
    ("messages", "tools", "says"),
    [
        ([], None, "chat is empty"),
        ("hello", None, "chat must be a list of dicts"),
        (["hello"], None, r"chat\[0\] must be a dict"),
        ([{"content": "x"}], None, r"chat\[0\] must have a 'role'"),
        ([{"role": 3, "content": "x"}], None, r"chat\[0\] must have a 'role' such as 'user', got 3"),
        ([{"role": "user", "content": 3}], None, "content must be a text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], None, "only parts of type 'text'"),
        ([{"role": "user", "tool_calls": "x"}], None, "tool_calls must be a list"),
        ([{"role": "user", "tool_calls": ["x"]}], None, "a tool call must be a dict"),
        ([{"role": "user", "content": "x"}], "tool", "tools must be a list"),
        ([{"role": "user", "content": "x"}], ["tool"], r"tools\[0\] must be a dict"),
    ],
)
def test_a_bad_conversation_is_refused_by_name(messages: Any, tools: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        parse_conversation(messages, tools, where="chat")


def test_one_conversation_needs_no_list_around_it() -> None:
    assert list_conversations(MESSAGES) == [MESSAGES]
    assert list_conversations([MESSAGES, MESSAGES[:1]]) == [MESSAGES, MESSAGES[:1]]
    assert list_conversations([]) == [[]]
    with pytest.raises(RequestError, match="must be a list"):
        list_conversations("hello")
