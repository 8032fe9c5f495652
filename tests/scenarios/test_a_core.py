"""SCENARIOS, section A: zero or short hits, silently."""

import pytest

from dalsegno.config import CacheConfig
from dalsegno.testing.builders import layout_alone, make_cut
from tests.scenarios.toy import B, H, Toy, random_prompt


@pytest.mark.parametrize("n", [1, 8, 15, 16, *range(17, B)])
def test_prompts_shorter_than_a_block_hit_to_the_unit(n: int) -> None:
    """1: with blocks stretched to 528 tokens, prompts below that never hit."""
    toy = Toy()
    prompt = random_prompt(n)
    toy.send(prompt)
    again = toy.send(prompt)
    assert again.num_cached_tokens == (n - 1) // H * H
    if n <= H:
        assert again.hit_report.lost == {"shorter_than_unit": n}


@pytest.mark.parametrize("budget", [24, 2048])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_prompt_of_whole_blocks_serves_its_resend_and_its_extensions(k: int, budget: int) -> None:
    """2: n an exact multiple of B hit nothing at all."""
    n = k * B
    prompt = random_prompt(n)
    for more, hit in [(0, n - H), (1, n), (2, n), (H, n)]:
        toy = Toy(budget=budget)
        toy.send(prompt)
        assert toy.send([*prompt, *random_prompt(more, 1)]).num_cached_tokens == hit


@pytest.mark.parametrize("n", [*range(B, 5 * B + 1, 13), 2 * B, 4 * B])
def test_one_producer_serves_a_resend_and_a_longer_sibling(n: int) -> None:
    """3: the two need different states, and keeping only one of them gave the other nothing."""
    toy = Toy()
    prompt = random_prompt(n)
    toy.send(prompt)
    resend, sibling = toy.hit(prompt), toy.hit([*prompt, *random_prompt(40, 1)])
    assert resend == (n - 1) // H * H
    assert sibling == n // H * H
    assert resend >= sibling - B


@pytest.mark.parametrize("shared", range(3 * B, 4 * B + 1, H))
@pytest.mark.parametrize("marked", [False, True])
def test_a_shared_prefix_hits_from_the_third_sighting_on_and_marked_from_the_second(shared: int, marked: bool) -> None:
    """4: slid over a whole block in steps of a unit, no length of the shared prefix falls to nothing."""
    toy = Toy()
    prefix = random_prompt(shared)
    hits = []
    for user in range(4):
        prompt = prefix + random_prompt(6 * B - shared, user + 1)
        request = toy.send(prompt, checkpoint_at=(shared,) if marked else ())
        hits.append(request.num_cached_tokens)
    assert hits == ([0, shared, shared, shared] if marked else [0, 0, shared, shared])


@pytest.mark.parametrize("n", [100, 128, 130, 200])
def test_groups_of_different_block_sizes_file_every_state_under_its_own_boundary(n: int) -> None:
    """7 and 12: chunks were aligned to the smallest block of any group. The audit is in `send`."""
    for budget in (24, 40, 64, 2048):
        layout = make_cut("aws", [4, 2, 1], num_slabs=200, block_size=32, block_sizes={"w": 48}, window=50)
        toy = Toy(layout=layout, config=CacheConfig(block_size=32), budget=budget)
        prompt = random_prompt(n)
        toy.send(prompt, 20)
        resend = toy.send(prompt, 20)
        assert resend.num_cached_tokens == (n - 1) // H * H
        assert set(resend.hit_report.boundary_by_group.values()) == {resend.num_cached_tokens}


@pytest.mark.parametrize("max_model_len", [20, 40, 63, 64])
def test_a_block_longer_than_any_request_still_serves_hits(max_model_len: int) -> None:
    """8: a block bigger than the maximal length meant that caching never worked, without a word."""
    toy = Toy(max_model_len=max_model_len)
    prompt = random_prompt(max_model_len - 1)
    toy.send(prompt)
    assert toy.send(prompt).num_cached_tokens == (max_model_len - 2) // H * H > 0


def test_a_resend_hits_the_same_every_time() -> None:
    """11: a lookup that split a node left an interior without a state, and identical prompts hit nothing for good."""
    toy = Toy()
    prompt = random_prompt(150)
    toy.send(prompt)
    assert [toy.send(prompt).num_cached_tokens for _ in range(10)] == [144] * 10
    toy.send([*prompt[:70], *random_prompt(50, 1)])
    assert [toy.send(prompt).num_cached_tokens for _ in range(3)] == [144] * 3


@pytest.mark.parametrize("n", [B - 1, B, B + 1, 2 * B + H, 5 * B - 3])
def test_every_prompt_hits_straight_after_it_was_warmed(n: int) -> None:
    """12: a test that warms everything first may find its first prompts evicted, and learn nothing."""
    layout = make_cut("as", [1, 1], block_size=B)
    config = CacheConfig(block_size=B)
    need = layout_alone(layout, config, max_model_len=n + 2, budget=2048)
    toy = Toy(layout=layout.with_slabs(need + 1), config=config, max_model_len=n + 2)
    for seed in range(12):
        prompt = random_prompt(n, seed)
        toy.send(prompt)
        assert toy.send(prompt).num_cached_tokens == (n - 1) // H * H
    assert toy.core.stats()["num_evicted_blocks"] > 0
