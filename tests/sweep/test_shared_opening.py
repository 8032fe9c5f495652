"""A shared opening is reused at any of its lengths: on the second sighting where it is marked, on the third if not.

The length slides over two blocks, token by token, under turns short and long: there is no cliff.
"""

from collections.abc import Sequence

import pytest

from dalsegno.config import CacheConfig
from dalsegno.testing.fake_worker import expected_tokens
from tests.conftest import LONG
from tests.matrix.test_switch_matrix import backend_of
from tests.sweep.engine import Sender

H = 16
NUM_SIGHTINGS = 4


def lengths(block_size: int) -> Sequence[int]:
    """Every length over two blocks; of large blocks those near the ends, and in between each remainder of the unit."""
    every = range(1, 2 * block_size + H + 2)
    if LONG or block_size <= 64:
        return every
    near = {end + offset for end in (block_size, 2 * block_size) for offset in (-H, *range(-2, 3), H)}
    return sorted(near | set(every[::61]))


def turn_length(shared: int, sighting: int, total: int) -> int:
    """Short turns first, as lookups by a prompt's end reach furthest there; then the rest of a fixed total."""
    return total - shared if sighting % 2 else 1 + (5 * shared + 3 * sighting) % (2 * H)


def reused(prompts: Sequence[list[int]], shared: int, *, marked: bool, has_state: bool) -> list[int]:
    """Cached tokens of each sighting: all whole units of the opening, once a state was kept there."""
    units = shared // H * H
    if marked or not has_state:
        return [0] + [units] * (len(prompts) - 1)
    # Before anybody was seen to share it, the first prompt's own last boundaries may lie in the opening.
    n = len(prompts[0])
    ends = [(n - 1) // H * H, *([n] if n % H == 0 else [])]
    return [0, max((end for end in ends if end <= shared), default=0)] + [units] * (len(prompts) - 2)


@pytest.mark.parametrize("block_size", [16, 32, 48, 528, 1024])
@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(("kinds", "budget"), [("as", 2048), ("aws", 39), ("a", 512)])
def test_it_is_reused_whole_at_every_length(kinds: str, budget: int, marked: bool, block_size: int) -> None:
    backend = backend_of(f"fake-{kinds}")
    config = CacheConfig(block_size=block_size, hash_block_size=H)
    total = 2 * block_size + 2 * H + 5
    for shared in lengths(block_size):
        sender = Sender(backend, config, budget=budget, num_slabs=400, max_model_len=total + 3 * H)
        opening = [(7 * i * i + shared) % 900 for i in range(shared)]
        prompts = [
            opening + [900 + sighting] * turn_length(shared, sighting, total) for sighting in range(NUM_SIGHTINGS)
        ]
        expected = reused(prompts, shared, marked=marked, has_state="s" in kinds)
        for sighting, (prompt, cached) in enumerate(zip(prompts, expected, strict=True)):
            request = sender.send(prompt, 3, marks=[shared] if marked else [])
            what = f"{shared} shared, sighting {sighting + 1}"
            assert request.num_cached_tokens == cached, what
            assert request.num_prefilled_tokens == len(prompt) - cached, what
            assert request.output_token_ids == expected_tokens(sender.core.layout, prompt, 3, 997), what
