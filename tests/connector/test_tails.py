"""Every tail a prompt or an answer leaves behind is found by another engine, at the last boundary it has."""

import random

import pytest

from dalsegno.store.memory import MemoryStore
from tests.connector.engines import VOCABULARY, StoreEngine

H, B = 16, 32
LENGTHS = (10, H, H + 1, B - 1, B, B + 1, 2 * B, 2 * B + 1, 100, 3 * B, 4 * B, 4 * B + H, 8 * B - 1, 8 * B, 8 * B + 1)


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(VOCABULARY), k=length)


@pytest.mark.parametrize("kinds", ["as", "a", "aws", "s", "ws", "aw"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_producer_of_one_token_leaves_its_whole_tail_to_another_engine(kinds: str, length: int) -> None:
    """33, 2: also at exact multiples of H and B, for a resend and for an extension."""
    store = MemoryStore(1 << 30)
    prompt = prompt_of(length)
    with StoreEngine(store, kinds, role="kv_producer") as producer:
        producer.send(prompt)
        producer.settle()
    with StoreEngine(store, kinds, role="kv_consumer") as consumer:
        resend = consumer.send(prompt, 20)
        assert resend.num_cached_tokens == (length - 1) // H * H, resend.hit_report
        consumer.settle()
    with StoreEngine(store, kinds, role="kv_consumer") as consumer:
        extension = consumer.send([*prompt, 1, 2, 3], 20)
        assert extension.num_cached_tokens == (length + 2) // H * H - ((length + 2) // H * H > length) * H


@pytest.mark.parametrize("kinds", ["as", "a", "aws"])
@pytest.mark.parametrize("length", [40, 64, 129])
def test_the_next_turn_resumes_at_the_answers_end_after_a_restart(kinds: str, length: int) -> None:
    """36: where decode states are not stored, the hit stops at the prompt's end."""
    store = MemoryStore(1 << 30)
    with StoreEngine(store, kinds) as engine:
        turn = engine.send(prompt_of(length), 75)
        engine.settle()
    with StoreEngine(store, kinds) as engine:
        known = turn.token_ids.tolist()
        following = engine.send([*known, 4, 5, 6], 5)
        assert following.num_cached_tokens == (len(known) - 1) // H * H, following.hit_report
        assert following.hit_report.cached_by_tier == {"store": following.num_cached_tokens}
        engine.settle()


def test_without_saving_answers_the_next_turn_resumes_at_the_prompts_end() -> None:
    store = MemoryStore(1 << 30)
    with StoreEngine(store, save_decode_cache=False) as engine:
        turn = engine.send(prompt_of(70), 100)
        engine.settle()
    with StoreEngine(store) as engine:
        assert engine.send([*turn.token_ids.tolist(), 4, 5], 5).num_cached_tokens == 64
