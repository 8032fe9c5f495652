"""Token ids to text while they arrive, and stop strings in that text.

A character may be spread over several tokens, and a token's text may depend on the one before it. So the newest tokens
are decoded together with a few older ones, and what a later token could still change is held back. The text given out
only grows, and at the end it is the decoding of all tokens at once, cut before a stop string.
"""

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Detokenizer", "IncrementalDecoder", "TextDecoder"]

_UNFINISHED = "\ufffd"
_MAX_WINDOW_TOKENS = 24


class TextDecoder(Protocol):
    """What a tokenizer must be able to do here."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens left out."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether a token has no text."""
        ...

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself, a special one as it is written."""
        ...


class IncrementalDecoder:
    """Decodes a growing list of tokens.

    Invariants: `_window` are the newest tokens with text and starts between two characters; its first `_num_settled`
    tokens end between two characters as well and are kept as context only; the first `_num_done` characters of its
    decoding have been given out.
    """

    def __init__(self, tokenizer: TextDecoder) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_settled = 0
        self._num_done = 0

    def push(self, token_id: int) -> str:
        """Take one more token; return the characters that are certain because of it (may be none)."""
        if self._tokenizer.is_special(token_id):
            return ""
        self._window.append(token_id)
        decoded = self._tokenizer.decode(self._window)
        certain = decoded.rstrip(_UNFINISHED)
        new = certain[self._num_done :]
        self._num_done += len(new)
        if len(certain) == len(decoded):
            self._settle()
        elif len(self._window) > _MAX_WINDOW_TOKENS:
            new += self._shorten(decoded)
        return new

    def finish(self) -> str:
        """Return what was held back: no more tokens will come."""
        return self._tokenizer.decode(self._window)[self._num_done :] if self._window else ""

    def _settle(self) -> None:
        """Make the tokens since the last settled one the new context."""
        self._window = self._window[self._num_settled :]
        self._num_settled = len(self._window)
        self._num_done = len(self._tokenizer.decode(self._window))

    def _shorten(self, decoded: str) -> str:
        """Settle the old part of a long run of bytes that are no characters; return its characters not yet given out.

        Where decoding two parts alone gives the same as decoding them together, no character spans the cut, and no
        later byte can change what is before it.
        """
        for cut in range(len(self._window) - 1, 0, -1):
            head = self._tokenizer.decode(self._window[:cut])
            if head + self._tokenizer.decode(self._window[cut:]) == decoded:
                new = head[self._num_done :]
                self._window = self._window[cut:]
                self._num_settled = max(0, self._num_settled - cut)
                self._num_done = max(0, self._num_done - len(head))
                return new
        return ""


class Detokenizer:
    """The text of one answer, with stop strings.

    Args:
        tokenizer: None gives no text at all.
        stop: strings that end the text; none of them is part of it.
        min_tokens: a stop string counts only where it ends behind the text of this many tokens.
    """

    def __init__(self, tokenizer: TextDecoder | None, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        assert tokenizer is not None or not stop, "stop strings need a tokenizer"
        self.stop_string: str | None = None
        self._decoder = None if tokenizer is None else IncrementalDecoder(tokenizer)
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_exempt = 0
        self._num_searched = 0
        self._text = ""
        self._held = 0

    @property
    def text(self) -> str:
        """What can be shown: the text so far without an end that may yet become a stop string."""
        return self._text[: len(self._text) - self._held]

    def push(self, token_ids: Sequence[int]) -> bool:
        """Take new tokens; return whether a stop string was found, after which nothing more is taken."""
        for token_id in token_ids:
            if self._decoder is None or self.stop_string is not None:
                break
            self._num_tokens += 1
            self._extend(self._decoder.push(token_id))
        return self.stop_string is not None

    def finish(self) -> bool:
        """Give out what was held back: no more tokens will come; return whether that completed a stop string."""
        if self._decoder is not None and self.stop_string is None:
            self._extend(self._decoder.finish())
            self._held = 0
        return self.stop_string is not None

    def _extend(self, new: str) -> None:
        self._text += new
        if not self._stop:
            return
        if self._num_tokens <= self._min_tokens:
            self._num_exempt = len(self._text)
        found = self._find_stop()
        if found is None:
            self._held = _overlap(self._text, self._stop)
            self._num_searched = len(self._text)
        else:
            start, self.stop_string = found
            self._text = self._text[:start]
            self._held = 0

    def _find_stop(self) -> tuple[int, str] | None:
        """Return start and string of the stop string that is complete first, of these the longest."""
        found: list[tuple[int, int, str]] = []
        for string in self._stop:
            # Only an end beyond what was searched (and beyond the exempt text) is new.
            after = max(self._num_searched, self._num_exempt)
            start = self._text.find(string, max(0, after - len(string) + 1))
            if start >= 0:
                found.append((start + len(string), start, string))
        if not found:
            return None
        _, start, string = min(found)
        return start, string


def _overlap(text: str, stop: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that begins one of the stop strings."""
    longest = min(len(text), max(map(len, stop)) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(string.startswith(end) for string in stop):
            return length
    return 0
