"""The tiny tokenizer keeps every byte, and its template renders what a chat API gives it."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dalsegno.models.tiny import TINY_KINDS
from tests.models.conftest import FolderOf

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: FolderOf) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_folder("llama") / "tokenizer.json"))


def _transformers_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@given(text=st.text())
def test_every_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= token < 4096 for token in ids)


def test_vocabulary_is_full_and_english_takes_few_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 4096
    text = "The following example shows how to open a file and read the lines of it."
    assert len(tokenizer.encode(text).ids) < len(text) / 3


def test_special_tokens_are_single_ids(tokenizer: Tokenizer) -> None:
    marked = "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>"
    ids = tokenizer.encode(marked).ids
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert [tokenizer.token_to_id(name) for name in specials] == [0, 1, 2]
    assert (ids.count(0), ids.count(1), ids.count(2)) == (1, 1, 1)


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_transformers_reads_the_same_tokenizer_for_every_kind(
    kind: str, tiny_folder: FolderOf, tokenizer: Tokenizer
) -> None:
    loaded = _transformers_tokenizer(tiny_folder(kind))
    assert (loaded.eos_token, loaded.pad_token, len(loaded)) == ("<|im_end|>", "<|endoftext|>", 4096)
    for text in ("def f(x):\n\treturn x", "  <|im_start|>ünï ∂ 日本<|im_end|>", ""):
        assert loaded.encode(text) == tokenizer.encode(text).ids
        assert loaded.decode(loaded.encode(text)) == text


def test_template_renders_tools_calls_and_results(tiny_folder: FolderOf) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "assistant", "content": "Sun."},
    ]
    tokenizer = _transformers_tokenizer(tiny_folder("qwen3-next"))
    block = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    rendered = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    system, rest = rendered.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\nBe short.\n")
    assert '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}' in system
    assert rest == (
        "<|im_start|>user\nWeather?<|im_end|>\n"
        f"<|im_start|>assistant\n{block}\n{block}<|im_end|>\n"
        "<|im_start|>tool\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nSun.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_rendering_of_a_conversation_extends_that_of_its_beginning(tiny_folder: FolderOf) -> None:
    messages = [
        {"role": role, "content": f"  {role} says\n"} for role in ("system", "user", "assistant", "tool", "user")
    ]
    tokenizer = _transformers_tokenizer(tiny_folder("qwen3-next"))
    for tools in (None, TOOLS):
        whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        for count in range(1, len(messages)):
            assert whole.startswith(tokenizer.apply_chat_template(messages[:count], tools=tools, tokenize=False))
