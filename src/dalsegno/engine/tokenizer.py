"""The checkpoint's tokenizer and chat template, behind the few calls the engine makes.

`transformers` does the work and is imported late. A text is always encoded the way the checkpoint asks for; a rendered
conversation gets no further special tokens, since its template has written them.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

from dalsegno.errors import CheckpointError, RequestError
from dalsegno.models.checkpoint import resolve_model_path

__all__ = ["EncodedText", "Tokenizer", "load_tokenizer"]

_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_TEMPLATE_VARIABLES = {"chat_template", "documents"}


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A text and its tokens.

    `ends[i]` is the number of characters up to the end of token i; empty where the tokenizer cannot tell.
    """

    text: str
    token_ids: list[int]
    ends: list[int]


class Tokenizer:
    """Text to token ids and back, and conversations to text.

    Args:
        backend: a tokenizer of `transformers`.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        # What the rendering function takes for itself; any other name reaches the template.
        self._rendering_arguments = frozenset(signature(backend.apply_chat_template).parameters) - _TEMPLATE_VARIABLES
        self._special_ids = frozenset(backend.all_special_ids)
        # Added tokens cut the text before it is tokenized: what stands on either side does not change the other.
        self._cutting_ids = frozenset(backend.added_tokens_decoder) | self._special_ids
        # The Rust tokenizer itself where there is one: an answer is decoded token by token, for many requests at once.
        fast = getattr(backend, "backend_tokenizer", None) if backend.is_fast else None
        self._decode: Callable[[list[int]], str] = (
            (lambda ids: backend.decode(ids, clean_up_tokenization_spaces=False)) if fast is None else fast.decode
        )

    @property
    def end_token_id(self) -> int | None:
        """The tokenizer's own end token."""
        end: int | None = self.backend.eos_token_id
        return end

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt's text, with the special tokens the checkpoint adds to a prompt.

        Raises:
            RequestError: the text holds something that is no Unicode character.
        """
        return self._encode(text, special=True).token_ids

    def encode_rendered(self, text: str) -> EncodedText:
        """Return the ids of a rendered conversation; raises as `encode`."""
        return self._encode(text, special=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens left out."""
        return self._decode([token_id for token_id in token_ids if token_id not in self._special_ids])

    def is_special(self, token_id: int) -> bool:
        """Whether a token has no text."""
        return token_id in self._special_ids

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself, a special one as it is written."""
        text: str = self.backend.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def last_cut(self, encoded: EncodedText, num_chars: int) -> int:
        """Return how many tokens there are up to the last cut within the first `num_chars` characters, or 0.

        A cut is the end of an added token: the tokens before it are the same whatever follows.
        """
        for index in range(bisect_right(encoded.ends, num_chars) - 1, -1, -1):
            if encoded.token_ids[index] in self._cutting_ids:
                return index + 1
        return 0

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation as the checkpoint's chat template writes it.

        Args:
            messages: dicts with `role` and what else the template reads.
            tools: function schemas offered to the model.
            add_generation_prompt: end with the opening of an assistant message.
            template_options: further variables of the template, such as `enable_thinking`.

        Raises:
            RequestError: there is no chat template, or it refuses the conversation or an option.
        """
        from jinja2 import TemplateError

        if not self.backend.chat_template:
            raise RequestError(
                "the tokenizer has no chat template; render the conversation yourself and use generate()"
            )
        taken = self._rendering_arguments.intersection(template_options or ())
        if taken:
            raise RequestError(f"chat_template_kwargs cannot set {min(taken)!r}: it is no variable of the template")
        try:
            text: str = self.backend.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **(template_options or {}),
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise RequestError(f"the chat template does not accept the conversation: {error}") from error
        return text

    def _encode(self, text: str, *, special: bool) -> EncodedText:
        fast = bool(self.backend.is_fast)
        try:
            found = self.backend(text, add_special_tokens=special, return_offsets_mapping=fast, verbose=False)
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"the text cannot be tokenized: {error}") from error
        ends = [end for _, end in found["offset_mapping"]] if fast else []
        return EncodedText(text, list(found["input_ids"]), ends)


def load_tokenizer(source: str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer of a folder or of a model on the hub.

    Raises:
        CheckpointError: it has none, or one that cannot be read.
    """
    path = resolve_model_path(source)
    if not any((path / name).exists() for name in _VOCABULARY_FILES):
        raise CheckpointError(
            f"{path} has no tokenizer (none of {', '.join(_VOCABULARY_FILES)}); name another folder with "
            "tokenizer=..., or give skip_tokenizer_init=True and serve prompts of token ids"
        )
    return Tokenizer(_read(path))


def _read(path: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:  # Readers of many formats, without a common error: each of them means the same here.
        raise CheckpointError(f"the tokenizer in {path} cannot be read: {type(error).__name__}: {error}") from error
