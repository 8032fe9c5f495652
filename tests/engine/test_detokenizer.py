"""Text while tokens arrive: never wrong, never taken back, and at the end what decoding everything at once gives."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.engine.detokenizer import Detokenizer, TextDecoder
from dalsegno.engine.tokenizer import Tokenizer
from tests.engine.stand_in import TEXT, VOCAB_SIZE, small_tokenizer

_TEXTS = st.text(alphabet=st.sampled_from([*sorted(set(TEXT)), "é", "ß", "𝄋", "\u200d", "👩"]), max_size=40)


def _stream(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    """Push ids one by one; return what was shown after each, then at the end."""
    shown = []
    for token_id in ids:
        detokenizer.push([token_id])
        shown.append(detokenizer.text)
    detokenizer.finish()
    return [*shown, detokenizer.text]


def _sentencepiece() -> Tokenizer:
    """The other common kind: words carry their space in front, unknown characters are single-byte tokens."""
    from tokenizers import Tokenizer as Raw
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "▁The", "▁fox", "▁", "fox", "es", ".", "▁über", "x"]
    vocabulary = {word: i for i, word in enumerate(words + [f"<0x{byte:02X}>" for byte in range(256)])}
    raw = Raw(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>"))


@given(_TEXTS)
def test_text_grows_without_replacement_characters_and_ends_whole(text: str) -> None:
    tokenizer = small_tokenizer()
    shown = _stream(Detokenizer(tokenizer), tokenizer.encode(text))
    assert shown[-1] == text
    for earlier, later in itertools.pairwise(shown):
        assert later.startswith(earlier)
        assert "\ufffd" not in earlier


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60))
def test_any_ids_at_all_end_as_decoding_them_at_once(ids: list[int]) -> None:
    tokenizer = small_tokenizer()
    shown = _stream(Detokenizer(tokenizer), ids)
    assert shown[-1] == tokenizer.decode(ids)
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(shown))


@given(st.lists(st.sampled_from(range(0x80, 0x100)), min_size=20, max_size=120))
def test_a_long_run_of_broken_bytes_ends_as_decoding_it_at_once(broken: list[int]) -> None:
    tokenizer = small_tokenizer()
    raw = tokenizer.backend.backend_tokenizer
    byte_tokens = {raw.decode([i]): i for i in range(VOCAB_SIZE)}
    assert "\ufffd" in byte_tokens
    singles = [raw.token_to_id(letter) for letter in _byte_letters(broken)]
    shown = _stream(Detokenizer(tokenizer), singles)
    assert shown[-1] == bytes(broken).decode("utf-8", errors="replace")
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(shown))


def _byte_letters(values: list[int]) -> list[str]:
    """The letters that stand for bytes 128 to 255 in byte-level vocabularies."""
    printable = [*range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable and not 0x21 <= byte <= 0x7E]
    return [chr(value) if value in printable else chr(256 + others.index(value)) for value in values]


def test_the_window_of_a_long_broken_run_stays_short() -> None:
    class Counting:
        longest = 0

        def decode(self, token_ids: Sequence[int]) -> str:
            self.longest = max(self.longest, len(token_ids))
            return bytes(token_ids).decode("utf-8", errors="replace")

        def is_special(self, token_id: int) -> bool:
            return token_id < 0

        def token_text(self, token_id: int) -> str:
            return self.decode([token_id])

    counting = Counting()
    detokenizer = Detokenizer(counting)
    detokenizer.push([0xC3] * 500)
    assert len(detokenizer.text) > 400
    detokenizer.finish()
    assert detokenizer.text == "\ufffd" * 500
    assert counting.longest < 40


def test_words_that_carry_their_space_are_joined_as_in_one_piece() -> None:
    tokenizer = _sentencepiece()
    ids = [1, 2, 5, 6, 7, *(3 + 6 + byte for byte in "狐狐".encode()), 2, 4]
    shown = _stream(Detokenizer(tokenizer), ids)
    assert shown[-1] == tokenizer.decode(ids) == "The foxes. über狐狐 foxfox"
    assert shown[:3] == ["The", "The fox", "The foxes"]
    assert not any("\ufffd" in text for text in shown)


def test_special_tokens_have_no_text() -> None:
    tokenizer = small_tokenizer()
    ids = tokenizer.encode("fox")
    assert _stream(Detokenizer(tokenizer), [1, *ids, 2])[-1] == "fox"


def test_without_a_tokenizer_there_is_no_text_and_no_error() -> None:
    assert _stream(Detokenizer(None), [1, 2, 3])[-1] == ""


class Letters:
    """One token per character."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def is_special(self, token_id: int) -> bool:
        return token_id == 0

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])


class Pairs(Letters):
    """Every token stands for two characters, so that stop strings end inside tokens."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token_id) + chr(token_id + 1) for token_id in token_ids)


def _oracle(text: str, stop: Sequence[str], exempt: int = 0) -> tuple[str, str | None]:
    """Text cut before the stop string that is complete first; of several, the longest."""
    for end in range(exempt + 1, len(text) + 1):
        complete = [string for string in stop if text[:end].endswith(string)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    st.integers(0, 8),
)
def test_stop_strings_agree_with_a_search_character_by_character(text: str, stop: list[str], min_tokens: int) -> None:
    detokenizer = Detokenizer(Letters(), stop, min_tokens)
    shown = _stream(detokenizer, list(map(ord, text)))
    expected = _oracle(text, stop, min(min_tokens, len(text)))
    assert (shown[-1], detokenizer.stop_string) == expected
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(shown))


def test_text_is_cut_before_a_stop_string_that_ends_inside_a_token() -> None:
    detokenizer = Detokenizer(Pairs(), ["cd e".replace(" ", "")])
    assert not detokenizer.push([ord("a")])
    assert detokenizer.push([ord("c"), ord("e"), ord("x")])
    assert detokenizer.text == "ab"
    assert detokenizer.stop_string == "cde"


def test_what_may_become_a_stop_string_is_not_shown_until_it_cannot() -> None:
    detokenizer = Detokenizer(Letters(), ["END"])
    shown = _stream(detokenizer, list(map(ord, "xEENx")))
    assert shown == ["x", "x", "xE", "xE", "xEENx", "xEENx"]
    unfinished = Detokenizer(Letters(), ["END"])
    assert _stream(unfinished, list(map(ord, "xEN")))[-2:] == ["x", "xEN"]


@pytest.mark.parametrize("tokenizer", [small_tokenizer(), Letters()])
def test_nothing_is_taken_after_a_stop_string(tokenizer: TextDecoder) -> None:
    encode = tokenizer.encode if isinstance(tokenizer, Tokenizer) else lambda text: list(map(ord, text))
    detokenizer = Detokenizer(tokenizer, ["fox"])
    assert detokenizer.push(encode("The fox and the dog"))
    assert detokenizer.push(encode("fox"))
    detokenizer.finish()
    assert detokenizer.text == "The "
