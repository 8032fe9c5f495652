"""Prompt lengths around units and blocks, met by every kind of second request: hits, work and answers are exact."""

import random
from collections.abc import Sequence

import pytest

from dalsegno.config import CacheConfig
from dalsegno.models.tiny import TINY_KINDS
from dalsegno.types import GroupKind
from tests.conftest import LONG
from tests.matrix.comparison import TOLERANCE
from tests.matrix.test_switch_matrix import backend_of
from tests.matrix.tiny_models import tiny_kinds_with
from tests.sweep.engine import Sender
from tests.sweep.oracle import HitOracle

H = 16
SHAPES = [
    (16, "as"),
    (32, "as"),
    (64, "as"),
    (1024, "as"),
    (16, "a"),
    (64, "a"),
    (16, "s"),
    (64, "aas"),
    (32, "aw"),
    (16, "aws"),
]
# Block sizes and chunk budgets of the real models: every kind meets all of them at full size, else one.
MODEL_SHAPES = [(64, 24), (16, 512), (48, 23)]
MODEL_CASES = [
    (kind, *shape)
    for i, kind in enumerate(TINY_KINDS)
    for j, shape in enumerate(MODEL_SHAPES)
    if LONG or i % len(MODEL_SHAPES) == j
]


def lengths(block_size: int) -> list[int]:
    block = min(block_size, 64)
    around = {1, H - 1, H, H + 1, block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1, 3 * block}
    return sorted(around | {5 * H, 5 * H + 1})


def second_requests(prompt: list[int], answer: list[int], block: int, fresh: Sequence[int]) -> dict[str, list[int]]:
    """The kinds of second request, by name."""
    kinds = {
        "identical": prompt,
        "+1": [*prompt, *fresh[:1]],
        "+2": [*prompt, *fresh[:2]],
        "+H": [*prompt, *fresh[:H]],
        "+B": [*prompt, *fresh[:block]],
        "next turn": [*prompt, *answer, *fresh[:9]],
    }
    if len(prompt) > H:
        kinds["diverges at kH"] = [*prompt[: (len(prompt) - 1) // H * H], *fresh[:20]]
        kinds["diverges inside a unit"] = [*prompt[: len(prompt) // H * H - 5], *fresh[:20]]
    return kinds


@pytest.mark.parametrize(("block_size", "kinds"), SHAPES)
@pytest.mark.parametrize("budget", [512, 24])
def test_hits_are_exactly_those_of_the_oracle(block_size: int, kinds: str, budget: int) -> None:
    backend = backend_of(f"fake-{kinds}")
    config = CacheConfig(block_size=block_size, hash_block_size=H)
    rng = random.Random(block_size)
    for n in lengths(block_size):
        sender = Sender(backend, config, budget=budget, num_slabs=800)
        oracle = HitOracle(H, H, has_state="s" in kinds)
        for kind in second_requests([0] * n, [0] * 4, 64, [0] * 64):
            prompt = [rng.randrange(1, 900) for _ in range(n)]
            fresh = [rng.randrange(1, 900) for _ in range(64)]
            first = serve(sender, oracle, prompt, 4, f"n={n}")
            following = second_requests(prompt, first, min(block_size, 64), fresh)[kind]
            for sighting in ("second", "third"):
                serve(sender, oracle, following, 4, f"n={n} {kind} {sighting}")


def serve(sender: Sender, oracle: HitOracle, prompt: list[int], max_tokens: int, what: str) -> list[int]:
    request = sender.send(prompt, max_tokens)
    assert request.num_cached_tokens == oracle.hit(prompt), what
    assert request.num_prefilled_tokens == len(prompt) - request.num_cached_tokens, what
    report = request.hit_report
    assert report.boundary + sum(report.lost.values()) == len(prompt), what
    assert request.num_states_kept <= sender.core.manager.config.max_states_per_request, what
    answer = request.output_token_ids
    oracle.learn(prompt, answer)
    return answer


@pytest.mark.parametrize(("kind", "block_size", "budget"), MODEL_CASES)
def test_a_real_model_hits_and_answers_as_promised(kind: str, block_size: int, budget: int) -> None:
    backend = backend_of(kind)
    config = CacheConfig(block_size=block_size, hash_block_size=H)
    sender = Sender(backend, config, budget=budget, num_slabs=60)
    cold = Sender(backend, CacheConfig(block_size=block_size, enable_prefix_caching=False), num_slabs=60)
    oracle = HitOracle(H, H, has_state=kind in tiny_kinds_with(GroupKind.STATE))
    rng = random.Random(7)
    for n in lengths(block_size) if LONG else (15, 16, 33, 64, 65):
        prompt = [rng.randrange(backend.vocab_size) for _ in range(n)]
        fresh = [rng.randrange(backend.vocab_size) for _ in range(64)]
        answer = serve(sender, oracle, prompt, 4, f"n={n}")
        for name, following in second_requests(prompt, answer, min(block_size, 64), fresh).items():
            got = serve(sender, oracle, following, 4, f"n={n} {name}")
            compare(sender, cold, following, got, f"n={n} {name}")


def compare(sender: Sender, cold: Sender, prompt: list[int], got: list[int], what: str) -> None:
    """The cold answer and first logits, from the engine that caches nothing."""
    request = cold.send(prompt, len(got))
    assert request.num_cached_tokens == 0
    expected = cold.logits[request.request_id]
    ours = sender.logits[f"request {sender._count}"]
    row, other = expected[len(prompt)], ours[len(prompt)]
    assert abs(row - other).max() <= TOLERANCE * (1 + abs(row).max()), what
    assert got == request.output_token_ids, what
