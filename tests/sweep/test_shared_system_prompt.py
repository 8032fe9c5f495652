"""The same on real models, through `chat` and the checkpoint's template: a system prompt that grows token by token."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from typing import Any

import pytest

from dalsegno import LLM, SamplingParams
from dalsegno.engine.outputs import RequestOutput
from dalsegno.models.tiny import TINY_KINDS
from dalsegno.types import GroupKind
from tests.conftest import LONG
from tests.matrix.tiny_models import tiny_kinds_with, tiny_model

H = 16
PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
QUESTIONS = ("Where is it?", "How much would that cost me, and when could you be here? " * 3, "no")
Message = dict[str, str]
Ask = Callable[[], list[RequestOutput]]

# Kind, block size, and the words of the system prompt; the template adds a few tokens. In every run a few kinds slide
# over two small blocks, below a large one and over its end.
CASES = [
    ("qwen3-next", 16, range(1, 37)),
    ("lfm2", 32, range(5, 73)),
    ("granite-hybrid", 528, range(15, 35)),
    ("lfm2", 528, range(518, 528)),
]
if LONG:
    CASES = [(kind, block_size, range(1, 2 * block_size + 20)) for kind in TINY_KINDS for block_size in (16, 48)]
    CASES += [("lfm2", 528, range(1, 1076)), ("lfm2", 1024, range(1000, 1040)), ("lfm2", 1024, range(2024, 2064))]


@contextmanager
def engines(kind: str, block_size: int, longest: int) -> Iterator[tuple[LLM, LLM]]:
    """An engine, and one that caches nothing."""
    options: dict[str, Any] = {"block_size": block_size, "kv_cache_memory_bytes": 2**28, "threads": 1}
    options |= {"max_model_len": longest + 200, "max_num_batched_tokens": 300}
    model = tiny_model(kind)
    with LLM(model, debug=True, **options) as llm, LLM(model, enable_prefix_caching=False, **options) as cold:
        yield llm, cold


def single_token_words(tokenizer: Any) -> list[str]:
    """Words that add one token each to a text, whatever stands before them."""
    words = [token[1:] for token in sorted(tokenizer.get_vocab()) if token[0] == "Ġ" and token[1:].isascii()]
    return [word for word in words if word.isalpha()]


def common_length(left: list[int], right: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def check(asking: list[Ask], answers: list[list[int]], expected: list[int], what: str) -> None:
    """Sightings in order: tokens reused, and the answers of a cold run."""
    for sighting, (ask, answer, cached) in enumerate(zip(asking, answers, expected, strict=True), 1):
        (output,) = ask()
        assert output.num_cached_tokens == cached, f"{what}, sighting {sighting}"
        assert output.outputs[0].token_ids == answer, f"{what}, sighting {sighting}"


def check_reuse(llm: LLM, cold: LLM, chats: list[list[Message]], mark: int, *, has_state: bool) -> None:
    """Conversations that share their first `mark` tokens, and a little more: as chats, and as plain token ids."""
    answered = cold.chat(chats, PARAMS)
    answers = [output.outputs[0].token_ids for output in answered]
    prompts = [output.prompt_token_ids for output in answered]
    shared = {common_length(prompts[i], prompts[j]) for i, j in ((0, 1), (0, 2), (1, 2))}
    assert len(shared) == 1, "the questions were meant to differ from their first token on"
    # What opens every user message is shared as well. No mark is there, but requests are seen to diverge there, and a
    # short prompt's last boundary may lie there.
    diverged = shared.pop() // H * H
    last = (len(prompts[0]) - 1) // H * H
    by_chance = last if last <= diverged else 0
    if not has_state:
        by_chance = diverged
    assert mark // H * H <= diverged
    marked, plain = [0, max(mark // H * H, by_chance), diverged], [0, by_chance, diverged]
    llm.reset_prefix_cache()
    check([partial(llm.chat, chat, PARAMS) for chat in chats], answers, marked, f"chat, {mark} shared")
    llm.reset_prefix_cache()
    ids = [{"prompt_token_ids": prompt} for prompt in prompts]
    check([partial(llm.generate, prompt, PARAMS) for prompt in ids], answers, plain, f"ids, {mark} shared")


@pytest.mark.parametrize(("kind", "block_size", "lengths"), CASES)
def test_a_system_prompt_of_any_length_is_reused_on_the_second_sighting(
    kind: str, block_size: int, lengths: range
) -> None:
    with engines(kind, block_size, lengths.stop) as (llm, cold):
        tokenizer = llm.get_tokenizer()
        words = random.Random(1).choices(single_token_words(tokenizer), k=lengths.stop)
        opened = []
        for count in lengths:
            system = {"role": "system", "content": " ".join(["You", *words[:count]])}
            opened.append(len(tokenizer(tokenizer.apply_chat_template([system], tokenize=False))["input_ids"]))
            chats = [[system, {"role": "user", "content": text}] for text in QUESTIONS]
            check_reuse(llm, cold, chats, opened[-1], has_state=kind in tiny_kinds_with(GroupKind.STATE))
        assert opened == list(range(opened[0], opened[0] + len(lengths))), "it does not grow token by token"
