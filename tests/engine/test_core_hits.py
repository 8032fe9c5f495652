"""The exact hit of every request, against a brute-force oracle that remembers prefixes as tuples."""

import random

import pytest

from dalsegno.config import CacheConfig
from dalsegno.testing.builders import make_core, make_layout, make_request, run_all
from dalsegno.testing.fake_worker import FakeWorker, expected_tokens
from tests.conftest import LONG
from tests.sweep.oracle import HitOracle

UNIT = 16


@pytest.mark.parametrize("seed", range(6 if LONG else 1))
@pytest.mark.parametrize("interval", [0, UNIT, 3 * UNIT])
@pytest.mark.parametrize("budget", [7, 24, 1000])
@pytest.mark.parametrize(("kinds", "units_per_block"), [("as", 1), ("as", 4), ("aas", 64), ("a", 2)])
def test_every_hit_is_exactly_the_promised_one(
    kinds: str, units_per_block: int, budget: int, interval: int, seed: int
) -> None:
    """One request after the other in memory that never runs out: resends, extensions, branches, next turns."""
    config = CacheConfig(
        block_size=UNIT * units_per_block, decode_checkpoint_interval=interval, max_states_per_request=1000
    )
    core = make_core(make_layout(kinds, config, num_slabs=1500), config, max_model_len=400, budget=budget)
    assert isinstance(core.worker, FakeWorker)
    oracle = HitOracle(UNIT, interval, has_state="s" in kinds)
    rng = random.Random(seed)
    seen: list[list[int]] = [[rng.randrange(50) for _ in range(250)]]
    for number in range(25):
        base = rng.choice(seen)
        cut = len(base) if rng.random() < 0.3 else rng.randrange(1, len(base) + 1)
        prompt = (base[:cut] + [rng.randrange(50) for _ in range(rng.choice([0, 1, 2, 16, 40]))])[:300]
        marks = tuple(rng.sample(range(1, 300), rng.choice([0, 0, 2])))
        num_answers = rng.choice([1, 5, 17, 50])
        request = make_request(f"r{number}", prompt, num_answers, checkpoint_at=marks)
        run_all(core, [request])
        assert request.num_cached_tokens == oracle.hit(prompt), f"request {number} of {len(prompt)} tokens"
        answer = expected_tokens(core.layout, prompt, num_answers, core.worker.vocab_size)
        assert request.output_token_ids == answer
        oracle.learn(prompt, answer, marks)
        seen += [prompt, prompt + answer]


@pytest.mark.parametrize("budget", [7, 1000])
@pytest.mark.parametrize("units_per_block", [1, 4])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 127, 128, 129, 192, 193])
def test_the_length_sweep(n: int, units_per_block: int, budget: int) -> None:
    """Harness 4 of SCENARIOS: each second request right behind a producer of its own."""
    config = CacheConfig(block_size=UNIT * units_per_block)
    prompt = list(range(n))
    seconds = {
        "resend": (prompt, (n - 1) // UNIT * UNIT),
        **{f"+{m}": ([*prompt, *[900] * m], n // UNIT * UNIT) for m in (1, 2, UNIT, config.block_size)},
    }
    # Where a prompt branches off no state was kept, so it finds the attention alone.
    seconds |= {f"branch at {cut}": ([*prompt[:cut], *[900] * 30], 0) for cut in (UNIT, 40) if cut + UNIT < n}
    for second, hit in seconds.values():
        core = make_core(make_layout("as", config, num_slabs=200), config, max_model_len=400, budget=budget)
        run_all(core, [make_request("first", prompt)])
        run_all(core, [request := make_request("second", second, 3)])
        assert request.num_cached_tokens == hit
        assert request.num_prefilled_tokens == len(second) - hit
        assert request.output_token_ids == expected_tokens(core.layout, second, 3, 997)


def test_a_hit_that_fails_once_does_not_shorten_later_ones() -> None:
    """SCENARIOS 11 and 91: a resend hits the same ten times over, whatever diverges in between."""
    core = make_core(max_model_len=400)
    prompt = list(range(100))
    run_all(core, [make_request("first", prompt)])
    for number in range(10):
        run_all(core, [request := make_request(f"resend {number}", prompt, 2)])
        assert request.num_cached_tokens == 96
        run_all(core, [make_request(f"branch {number}", [*prompt[: 9 * number + 5], *[700 + number] * 40])])
