"""Prompts as callers write them, turned into checked token ids.

A whole batch is checked before any of it is queued, so a bad prompt costs nothing but its own error message. Token ids
become a u32 buffer here, once.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dalsegno.errors import RequestError
from dalsegno.hashing.block_hash import to_token_array
from dalsegno.options import nearest_name

__all__ = ["Prompt", "PromptLike", "PromptParser", "list_prompts", "token_buffer"]

PromptLike = str | Sequence[int] | Mapping[str, Any]
"""A text, a list of token ids, or a dict with one of `prompt` and `prompt_token_ids` and the keys of `_EXTRA_KEYS`."""

_TEXT_KEYS = ("prompt", "prompt_token_ids")
_EXTRA_KEYS = ("cache_salt", "priority", "checkpoint_at", "no_store", "kv_transfer_params")
_FOREIGN_KEYS = ("mm_processor_kwargs", "multi_modal_data", "multi_modal_uuids", "prompt_embeds")
_MAX_SALT_LENGTH = 128


@dataclass(frozen=True, slots=True)
class Prompt:
    """One checked prompt.

    Attributes:
        token_ids: u32 buffer of at least one id, each in the vocabulary.
        text: the text it was given as, or None.
        cache_salt: only prompts with the same salt share what is cached.
        priority: smaller first.
        checkpoint_at: token counts, ascending, at which a state is worth keeping.
        no_store: keep nothing of it in an external store.
        kv_transfer_params: for the connector.
    """

    token_ids: "array[int]"
    text: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    checkpoint_at: tuple[int, ...] = ()
    no_store: bool = False
    kv_transfer_params: dict[str, Any] | None = None


def list_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """Return the prompts as a list: a text, a dict, or a non-empty list of integers is one prompt by itself.

    Raises:
        RequestError: it is none of these, nor a list of them.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(f"prompts must be a text, token ids, a dict, or a list of these, got {_brief(prompts)}")
    found: list[Any] = list(prompts)
    if found and not any(isinstance(prompt, str | Mapping | Iterable) for prompt in found):
        return [found]
    return found


class PromptParser:
    """Checks prompts against one model.

    Args:
        encode: text to token ids; None when the engine has no tokenizer, then texts are refused.
        vocab_size: ids are below this.
        max_model_len: prompts are shorter than this, so that one token can follow.
        takes_priority: whether the scheduling policy heeds priorities; where it does not, one is refused.
    """

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]] | None,
        vocab_size: int,
        max_model_len: int,
        *,
        takes_priority: bool = True,
    ) -> None:
        self._encode = encode
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._takes_priority = takes_priority

    def parse(self, given: PromptLike, where: str = "prompt") -> Prompt:
        """Return the checked prompt.

        Args:
            given: the prompt as the caller wrote it.
            where: what to call it in error messages.

        Raises:
            RequestError: the prompt is of no known form, empty, too long, or holds an id outside the vocabulary; or one
                of its keys is unknown or has a value that is not allowed.
        """
        fields = dict(given) if isinstance(given, Mapping) else None
        if fields is None:
            return self._finish(given, {}, where)
        self._check_keys(fields, where)
        sources = [key for key in _TEXT_KEYS if fields.get(key) is not None]
        if len(sources) != 1:
            raise RequestError(
                f"{where} must have exactly one of 'prompt' (a text) and 'prompt_token_ids', got "
                f"{' and '.join(sources) or 'neither'}"
            )
        source = fields[sources[0]]
        if (sources[0] == "prompt") != isinstance(source, str):
            wanted = "a text" if sources[0] == "prompt" else "a list of token ids"
            raise RequestError(f"{where}: {sources[0]!r} must be {wanted}, got {_brief(source)}")
        return self._finish(source, fields, where)

    def parse_rendered(
        self, text: str, token_ids: Sequence[int], marks: tuple[int, ...], where: str = "prompt"
    ) -> Prompt:
        """Return the prompt of a rendered conversation with its marks; raises as `parse`."""
        prompt = self._finish(token_ids, {"checkpoint_at": marks}, where)
        return replace(prompt, text=text)

    def _finish(self, source: Any, fields: Mapping[str, Any], where: str) -> Prompt:
        text = source if isinstance(source, str) else None
        if text is not None and self._encode is None:
            raise RequestError(f"{where} is a text, but this engine has no tokenizer; give token ids instead")
        ids = self._encode(text) if text is not None and self._encode is not None else source
        token_ids = token_buffer(ids, self._vocab_size, where)
        if not token_ids:
            raise RequestError(f"{where} is empty; it must hold at least one token")
        if len(token_ids) >= self._max_model_len:
            raise RequestError(
                f"{where} has {len(token_ids)} tokens; at most {self._max_model_len - 1} are allowed, so that one "
                f"token can follow within max_model_len={self._max_model_len}"
            )
        priority = _priority(fields.get("priority"), where)
        if priority and not self._takes_priority:
            raise RequestError(
                f"{where}: priority={priority} has no effect under scheduling_policy='fcfs'; use 'priority'"
            )
        return Prompt(
            token_ids=token_ids,
            text=text,
            cache_salt=_cache_salt(fields.get("cache_salt"), where),
            priority=priority,
            checkpoint_at=_checkpoints(fields.get("checkpoint_at"), len(token_ids), where),
            no_store=_no_store(fields.get("no_store"), where),
            kv_transfer_params=_transfer_params(fields.get("kv_transfer_params"), where),
        )

    @staticmethod
    def _check_keys(fields: Mapping[Any, Any], where: str) -> None:
        valid = (*_TEXT_KEYS, *_EXTRA_KEYS)
        for key, value in fields.items():
            if key in valid or (key in _FOREIGN_KEYS and not value):
                continue
            if key in _FOREIGN_KEYS:
                raise RequestError(f"{where}: {key!r} is not supported; prompts are text only")
            nearest = nearest_name(str(key), valid)
            hint = f"did you mean {nearest!r}?" if nearest else f"valid keys: {', '.join(valid)}"
            raise RequestError(f"{where} has no key {key!r}; {hint}")


def token_buffer(ids: Any, vocab_size: int, where: str) -> "array[int]":
    """Return token ids as a u32 buffer.

    Raises:
        RequestError: `ids` is no sequence of integers in `[0, vocab_size)`; the first bad one is named.
    """
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise RequestError(f"{where} must be a text, a list of token ids, or a dict, got {_brief(ids)}")
    try:
        values = list(ids)
    except TypeError as error:  # a tensor without dimensions says it can be iterated
        raise RequestError(f"{where} must be a text, a list of token ids, or a dict, got {_brief(ids)}") from error
    if set(map(type, values)) - {int}:
        values = [_token_id(value, position, where) for position, value in enumerate(values)]
    if values and (min(values) < 0 or max(values) >= vocab_size):
        position = next(i for i, value in enumerate(values) if not 0 <= value < vocab_size)
        raise RequestError(
            f"{where}: token id {values[position]} at position {position} is outside the vocabulary; ids are integers "
            f"from 0 to {vocab_size - 1}"
        )
    return to_token_array(values)


def _token_id(value: Any, position: int, where: str) -> int:
    # Integers of numpy and torch answer `__index__`; so does bool, which is never meant as a token.
    if isinstance(value, bool) or type(value).__name__ == "bool_" or not hasattr(value, "__index__"):
        raise RequestError(f"{where}: token ids must be integers, got {_brief(value)} at position {position}")
    try:
        return int(value.__index__())
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(
            f"{where}: token ids must be integers, got {_brief(value)} at position {position}"
        ) from error


def _no_store(value: Any, where: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{where}: no_store must be True or False, got {_brief(value)}")
    return bool(value)


def _transfer_params(value: Any, where: str) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise RequestError(f"{where}: kv_transfer_params must be a dict with names as keys, got {_brief(value)}")
    if not isinstance(value.get("do_remote_decode", False), bool):
        raise RequestError(
            f"{where}: do_remote_decode in kv_transfer_params must be True or False, "
            f"got {_brief(value['do_remote_decode'])}"
        )
    return dict(value)


def _cache_salt(value: Any, where: str) -> str | None:
    if value is None:
        return None
    # A lone surrogate is no character and could not be hashed.
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_SALT_LENGTH or not value.isprintable():
        raise RequestError(
            f"{where}: cache_salt must be a string of 1 to {_MAX_SALT_LENGTH} printable characters, got {_brief(value)}"
        )
    return value


def _priority(value: Any, where: str) -> int:
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{where}: priority must be an integer (smaller is served first), got {_brief(value)}")
    return value


def _checkpoints(value: Any, num_tokens: int, where: str) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"{where}: checkpoint_at must be a list of token counts, got {_brief(value)}")
    counts = list(value)
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= num_tokens:
            raise RequestError(
                f"{where}: checkpoint_at must hold counts of its {num_tokens} tokens, from 1, got {_brief(count)}"
            )
    return tuple(sorted(set(counts)))


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
