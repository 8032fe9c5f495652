"""Prompts: every documented form, and a clear refusal of everything else."""

from array import array
from typing import Any

import numpy as np
import pytest

from dalsegno.engine.inputs import PromptParser, list_prompts
from dalsegno.errors import RequestError

VOCAB_SIZE = 100


def _parser(*, with_tokenizer: bool = True, max_model_len: int = 20) -> PromptParser:
    return PromptParser(
        (lambda text: [ord(c) % VOCAB_SIZE for c in text]) if with_tokenizer else None, 100, max_model_len
    )


@pytest.mark.parametrize(
    "given",
    [
        [7, 8, 9],
        (7, 8, 9),
        array("I", [7, 8, 9]),
        np.array([7, 8, 9]),
        [np.int64(7), 8, np.uint8(9)],
        range(7, 10),
        {"prompt_token_ids": [7, 8, 9]},
        {"prompt": None, "prompt_token_ids": [7, 8, 9]},
    ],
)
def test_token_ids_in_any_sequence_are_the_same_prompt(given: Any) -> None:
    prompt = _parser().parse(given)
    assert prompt.token_ids == array("I", [7, 8, 9])
    assert prompt.text is None


@pytest.mark.parametrize("given", ["abc", {"prompt": "abc"}])
def test_a_text_is_tokenized_and_kept(given: Any) -> None:
    prompt = _parser().parse(given)
    assert prompt.token_ids.tolist() == [97, 98, 99]
    assert prompt.text == "abc"


def test_all_keys_are_taken_over() -> None:
    given = {"prompt_token_ids": [1] * 12, "cache_salt": "tenant", "priority": -3, "checkpoint_at": [9, 4, 4, 12]}
    prompt = _parser().parse(given)
    assert (prompt.cache_salt, prompt.priority, prompt.checkpoint_at) == ("tenant", -3, (4, 9, 12))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "is empty"),
        ("", "is empty"),
        ({"prompt_token_ids": []}, "is empty"),
        ([1] * 20, "has 20 tokens; at most 19"),
        ([1, 100], "token id 100 at position 1 is outside the vocabulary; ids are integers from 0 to 99"),
        ([-1], "token id -1 at position 0"),
        ([1, True], "must be integers, got True at position 1"),
        ([1, np.bool_(True)], "must be integers"),
        ([1, 2.0], "must be integers, got 2.0 at position 1"),
        ([1, "2"], "must be integers, got '2'"),
        ([1, None], "must be integers, got None"),
        ([2**40], "outside the vocabulary"),
        (5, "must be a text, a list of token ids, or a dict, got 5"),
        (None, "must be a text"),
        (b"abc", "must be a text"),
        ({}, "exactly one of 'prompt' .* got neither"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "got prompt and prompt_token_ids"),
        ({"prompt": [1]}, "'prompt' must be a text"),
        ({"prompt_token_ids": "abc"}, "'prompt_token_ids' must be a list of token ids"),
        ({"prompt": "a", "cachesalt": "x"}, "no key 'cachesalt'; did you mean 'cache_salt'"),
        ({"prompt": "a", "zzz": "x"}, "no key 'zzz'; valid keys: prompt, "),
        ({"prompt": "a", 3: "x"}, "no key 3"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "text only"),
        ({"prompt_embeds": [[0.5]]}, "text only"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt must be a string of 1 to 128"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt must be"),
        ({"prompt": "a", "cache_salt": "x" * 129}, "cache_salt must be"),
        ({"prompt": "a", "cache_salt": "\ud800"}, "cache_salt must be"),
        ({"prompt": "a", "priority": 1.5}, "priority must be an integer"),
        ({"prompt": "a", "priority": True}, "priority must be an integer"),
        ({"prompt": "abc", "checkpoint_at": 2}, "checkpoint_at must be a list"),
        ({"prompt": "abc", "checkpoint_at": [0]}, "checkpoint_at must hold counts of its 3 tokens, from 1, got 0"),
        ({"prompt": "abc", "checkpoint_at": [4]}, "got 4"),
        ({"prompt": "abc", "checkpoint_at": [True]}, "got True"),
        ({"prompt": "abc", "checkpoint_at": "12"}, "checkpoint_at must be a list"),
    ],
)
def test_a_bad_prompt_is_refused_by_name_with_what_was_given(given: Any, says: str) -> None:
    with pytest.raises(RequestError, match=f"prompts\\[3\\].*{says}"):
        _parser().parse(given, "prompts[3]")


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    assert len(_parser(max_model_len=20).parse([1] * 19).token_ids) == 19


def test_without_a_tokenizer_token_ids_are_served_and_texts_refused() -> None:
    parser = _parser(with_tokenizer=False)
    assert parser.parse({"prompt_token_ids": [1, 2]}).token_ids.tolist() == [1, 2]
    with pytest.raises(RequestError, match="has no tokenizer; give token ids"):
        parser.parse("abc")


def test_a_single_prompt_needs_no_list_around_it() -> None:
    assert list_prompts("abc") == ["abc"]
    assert list_prompts([1, 2, 3]) == [[1, 2, 3]]
    assert list_prompts({"prompt": "a"}) == [{"prompt": "a"}]
    mixed: list[Any] = ["a", [1], {"prompt": "b"}]
    assert list_prompts(mixed) == mixed
    assert list_prompts([]) == []
    assert list_prompts([[]]) == [[]]
    wrong: list[Any] = [5, None, b"abc"]
    for given in wrong:
        with pytest.raises(RequestError, match="prompts must be"):
            list_prompts(given)


def test_a_rendered_conversation_keeps_text_and_marks() -> None:
    prompt = _parser().parse_rendered("ab", [1, 2], (1, 2))
    assert (prompt.text, prompt.token_ids.tolist(), prompt.checkpoint_at) == ("ab", [1, 2], (1, 2))


def test_a_priority_without_effect_is_refused() -> None:
    strict = PromptParser(None, 100, 50, takes_priority=False)
    assert strict.parse({"prompt_token_ids": [1], "priority": 0}).priority == 0
    with pytest.raises(RequestError, match="priority=2 has no effect under scheduling_policy='fcfs'"):
        strict.parse({"prompt_token_ids": [1], "priority": 2})
