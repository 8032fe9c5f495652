"""Log-probabilities as callers read them: by token id, with ranks and the texts of their tokens."""

from collections.abc import Iterable

from dalsegno.engine.detokenizer import TextDecoder
from dalsegno.engine.outputs import Logprob
from dalsegno.types import TokenLogprobs

__all__ = ["LogprobReader"]


class LogprobReader:
    """Turns what the worker reports into dicts; remembers the text of each token it has met."""

    def __init__(self, tokenizer: TextDecoder | None) -> None:
        """Read texts with `tokenizer`; None gives none."""
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def read(self, rows: Iterable[TokenLogprobs]) -> list[dict[int, Logprob]]:
        """Return one dict per row: the token itself first, then the likeliest, best first."""
        return [self._read(row) for row in rows]

    def _read(self, row: TokenLogprobs) -> dict[int, Logprob]:
        # Of tokens that are equally likely the rank counts all, the place among the likeliest only those before.
        ranks = (row.rank, *range(1, len(row.token_ids)))
        return {
            token_id: Logprob(logprob, rank, self._text(token_id))
            for token_id, logprob, rank in zip(row.token_ids, row.logprobs, ranks, strict=True)
        }

    def _text(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._tokenizer.token_text(token_id)
        return text
