"""Sampling: what each parameter keeps, and streams that depend on seed, sample and position alone."""

import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from dalsegno.errors import EngineError
from dalsegno.sampling_params import SamplingParams
from dalsegno.types import SampleSpec
from dalsegno.worker.sampler import sample_tokens, uniform

GOLDEN = (0.156742553465558, 0.6612161775000036)
LOGITS = torch.tensor([[1.0, 3.0, 2.0, 3.0, -torch.inf, 0.5, 2.0, -1.0]])


def _spec(
    temperature: float = 1.0,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    indices: tuple[int, ...] = (0,),
    position: int = 5,
    forbidden: tuple[int, ...] = (),
) -> SampleSpec:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return SampleSpec(params, seed, indices, position, forbidden)


def _drawn(logits: Tensor, count: int = 3000, **options: float) -> Counter[int]:
    specs = [_spec(position=position, **options) for position in range(count)]  # type: ignore[arg-type]
    return Counter(token for (token,) in sample_tokens(logits.expand(count, -1), specs))


def test_greedy_takes_the_lowest_of_the_best() -> None:
    assert sample_tokens(LOGITS, [_spec(0.0, indices=(0, 1, 2))]) == [[1, 1, 1]]
    assert sample_tokens(LOGITS, [_spec(0.0, forbidden=(1, 700))]) == [[3]]
    assert sample_tokens(LOGITS, [_spec(0.0, forbidden=(1, 3))]) == [[2]]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature: float) -> None:
    drawn = _drawn(LOGITS, 20000, temperature=temperature)
    expected = torch.softmax(LOGITS[0] / temperature, dim=0)
    for token, share in enumerate(expected.tolist()):
        # Five standard deviations of a binomial share.
        assert abs(drawn[token] / 20000 - share) <= 5 * (share * (1 - share) / 20000) ** 0.5 + 1e-9


@pytest.mark.parametrize(("top_k", "kept"), [(1, {1}), (2, {1, 3}), (3, {1, 2, 3}), (4, {1, 2, 3, 6}), (50, None)])
def test_top_k_keeps_the_best_and_of_ties_the_lowest(top_k: int, kept: set[int] | None) -> None:
    assert set(_drawn(LOGITS, top_k=top_k)) == (kept or {0, 1, 2, 3, 5, 6, 7})


@pytest.mark.parametrize("seed", range(5))
def test_top_p_keeps_the_fewest_tokens_that_reach_it(seed: int) -> None:
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(seed))
    for top_p in (0.05, 0.4, 0.8):
        probabilities = torch.softmax(logits[0].double(), dim=0)
        kept: set[int] = set()
        for token in probabilities.argsort(descending=True).tolist():
            if sum(float(probabilities[t]) for t in kept) >= top_p:
                break
            kept.add(token)
        drawn = _drawn(logits, 4000, top_p=top_p)
        assert set(drawn) <= kept
        for token in kept:
            share = float(probabilities[token]) / sum(float(probabilities[t]) for t in kept)
            assert abs(drawn[token] / 4000 - share) < 0.05


def test_top_p_counts_the_tokens_that_top_k_left() -> None:
    # Of 0.4, 0.3, 0.2, 0.1 two are left, 4/7 and 3/7: the first alone reaches 0.5, of all four it would not.
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert set(_drawn(logits, top_k=2, top_p=0.5)) == {0}
    assert set(_drawn(logits, top_p=0.5)) == {0, 1}


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, {0, 1, 2, 3}), (0.45, {0, 1, 2}), (0.6, {0, 1}), (1.0, {0})])
def test_min_p_drops_what_is_too_far_from_the_likeliest(min_p: float, kept: set[int]) -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert set(_drawn(logits, min_p=min_p)) == kept
    # The temperature comes first: squared, the shares are 1, 9/16, 1/4 and 1/16.
    assert set(_drawn(logits, min_p=0.45, temperature=0.5)) == {0, 1}


def test_top_p_counts_the_tokens_that_min_p_left() -> None:
    # Of 0.4, 0.3, 0.2, 0.1 two are left: the first alone has 4/7 of them, and 0.4 of all four.
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert set(_drawn(logits, min_p=0.6, top_p=0.5)) == {0}


def test_forbidden_tokens_never_come() -> None:
    assert set(_drawn(LOGITS, forbidden=(1, 3, 99))) == {0, 2, 5, 6, 7}  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.tensor([[1.0, 2.0, 1.5, -torch.inf, 1e30]])
    assert sample_tokens(logits, [_spec(temperature)]) == [[4]]


def test_a_huge_temperature_is_even() -> None:
    assert set(_drawn(LOGITS, temperature=1e300)) == {0, 1, 2, 3, 5, 6, 7}


def test_a_row_is_sampled_alike_in_any_batch() -> None:
    rng = random.Random(4)
    g = torch.Generator().manual_seed(4)
    logits = torch.randn(24, 500, generator=g)
    specs = [
        _spec(
            rng.choice([0.0, 0.3, 1.0, 3.0]),
            top_k=rng.choice([0, 1, 5, 50]),
            top_p=rng.choice([1.0, 0.9, 0.2]),
            min_p=rng.choice([0.0, 0.0, 0.3]),
            seed=rng.randrange(-(2**63), 2**63),
            indices=tuple(range(rng.randint(1, 3))),
            position=rng.randrange(1000),
            forbidden=tuple(rng.sample(range(500), rng.randint(0, 3))),
        )
        for _ in range(24)
    ]
    together = sample_tokens(logits, specs)
    assert together == [sample_tokens(logits[i : i + 1], [specs[i]])[0] for i in range(24)]
    order = rng.sample(range(24), 24)
    assert [together[i] for i in order] == sample_tokens(logits[order], [specs[i] for i in order])
    assert len({token for tokens in together for token in tokens}) > 10


def test_seed_sample_and_position_each_make_another_stream() -> None:
    logits = torch.zeros(1, 1 << 16)
    base = sample_tokens(logits, [_spec(indices=(0, 1, 2))])[0]
    assert len(set(base)) == 3
    assert sample_tokens(logits, [_spec(indices=(2,))])[0] == base[2:]
    others = [_spec(seed=1), _spec(position=6), _spec(seed=-1), _spec(position=0, seed=5)]
    assert len({base[0], *(sample_tokens(logits, [spec])[0][0] for spec in others)}) == 5


def test_the_numbers_of_the_streams_are_fixed_and_even() -> None:
    assert uniform(0, 0, 0) == pytest.approx(GOLDEN[0], abs=0)
    assert uniform(-5, 3, 70000) == pytest.approx(GOLDEN[1], abs=0)
    numbers = [uniform(seed, 0, position) for seed in range(20) for position in range(500)]
    assert all(0 <= number < 1 for number in numbers)
    shares = Counter(int(number * 10) for number in numbers)
    assert all(abs(shares[i] / len(numbers) - 0.1) < 0.02 for i in range(10))


def test_the_logits_given_are_not_changed() -> None:
    logits = LOGITS.clone()
    sample_tokens(logits, [_spec(0.7, top_k=3, top_p=0.9, forbidden=(2,))])
    assert torch.equal(logits, LOGITS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error_that_names_the_row(temperature: float) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 2] = float("nan")
    with pytest.raises(EngineError, match=r"rows \[1\]"):
        sample_tokens(logits, [_spec(temperature)] * 3)
    with pytest.raises(EngineError, match=r"rows \[0\]"):
        sample_tokens(LOGITS, [_spec(temperature, forbidden=tuple(range(8)))])
