"""SCENARIOS, sections H and K: reset, hashes, key domains, plans."""

import itertools

import pytest

from dalsegno.testing.builders import run_all, steps
from dalsegno.testing.fake_worker import expected_tokens
from tests.scenarios.toy import H, Toy, random_prompt

SALTS = [None, "", "a", "b", "ab", "A", "a ", "lora a", "none"]


def test_a_reset_is_refused_while_requests_run_and_says_so() -> None:
    """80: a reset that was refused was answered like one that was done."""
    toy = Toy(budget=32)
    prompt = random_prompt(150)
    toy.send(prompt)
    running = toy.request([*prompt, 1, 2, 3], 20)
    toy.core.add_request(running)
    toy.core.step()
    assert toy.core.reset_prefix_cache() is False
    assert toy.hit(prompt) == 144
    run_all(toy.core)
    toy.check(running)
    assert toy.core.reset_prefix_cache() is True
    assert toy.hit(prompt) == 0


def test_after_a_reset_the_next_request_misses_and_the_one_after_hits_again() -> None:
    """80"""
    toy = Toy()
    prompt = random_prompt(150)
    toy.send(prompt)
    assert toy.core.reset_prefix_cache()
    again = toy.send(prompt)
    assert (again.num_cached_tokens, again.hit_report.lost) == (0, {"new": 144, "sub_unit": 6})
    assert toy.send(prompt).num_cached_tokens == 144


def test_requests_that_only_wait_do_not_keep_a_reset_from_happening() -> None:
    """80: they hold no block."""
    toy = Toy()
    prompt = random_prompt(150)
    toy.send(prompt)
    waiting = toy.request(prompt)
    toy.core.add_request(waiting)
    assert toy.core.reset_prefix_cache()
    toy.send_all()
    assert waiting.num_cached_tokens == 0


@pytest.mark.parametrize(("writer", "reader"), list(itertools.permutations(SALTS, 2)))
def test_no_key_domain_hits_another(writer: str | None, reader: str | None) -> None:
    """82: the same tokens under every pair of salts."""
    toy = Toy()
    prompt = random_prompt(3 * H + 5)
    toy.send(prompt, cache_salt=writer)
    assert toy.hit(prompt, cache_salt=reader) == 0
    assert toy.hit(prompt, cache_salt=writer) == 3 * H


def test_a_salted_prompt_shares_no_block_with_its_unsalted_twin() -> None:
    """82: neither while they run together nor afterwards."""
    toy = Toy()
    prompt = random_prompt(100)
    plain, salted = toy.request(prompt, 9), toy.request(prompt, 9, cache_salt="s")
    toy.core.add_request(plain)
    toy.core.add_request(salted)
    toy.core.step()
    tables = [set(toy.core.manager.block_tables(request)[0]) for request in (plain, salted)]
    assert not tables[0] & tables[1]
    run_all(toy.core)
    toy.check(plain, salted)


def test_a_branch_deletes_no_state_below_the_point_where_it_leaves() -> None:
    """91: all checkpoints were erased when one did not match."""
    toy = Toy()
    prompt = random_prompt(200)
    toy.send(prompt, checkpoint_at=(50, 100, 150))
    for cut in (170, 120, 60, 20):
        toy.send([*prompt[:cut], *random_prompt(40, cut)], 3)
        assert toy.hit(prompt) == 192
        for mark in (48, 96, 144):
            assert toy.hit([*prompt[: mark + 1], 7, 7]) == mark


def test_a_short_prompt_hits_per_unit() -> None:
    """91: none for prompts below 68 tokens."""
    toy = Toy()
    prompt = random_prompt(20)
    toy.send(prompt)
    assert toy.send(prompt).num_cached_tokens == 16


@pytest.mark.parametrize("budget", [16, 33, 2048])
def test_the_states_that_are_kept_do_not_depend_on_how_the_prompt_was_chunked(budget: int) -> None:
    """93: the plan is a pure function of the request and the configuration."""
    toy = Toy(budget=budget)
    prompt = random_prompt(300)
    request = toy.send(prompt, checkpoint_at=(40, 111, 222))
    index = toy.core.manager.index
    kept = {boundary for block in index.published(1) for boundary, _ in index.vouched(1, block)}
    assert kept == {32, 96, 208, 288}
    assert request.num_states_kept == 4


def test_tokens_a_preemption_recomputes_change_no_answer() -> None:
    """83: and are no hits; the engine's own tests count them."""
    toy = Toy(budget=64)
    request = toy.request(random_prompt(150), 40)
    toy.core.add_request(request)
    for number, _ in enumerate(steps(toy.core)):
        if number % 7 == 6 and toy.core.scheduler.running:
            toy.core.scheduler._preempt(request)
    toy.check(request)
    assert request.num_preemptions >= 5
    assert request.output_token_ids == expected_tokens(toy.core.layout, random_prompt(150), 40, 997)
