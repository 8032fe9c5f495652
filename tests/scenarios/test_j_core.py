"""SCENARIOS, section J: a bad configuration fails at once, with one message that names the values to use."""

import itertools
from typing import Any

import pytest

from dalsegno.config import CacheConfig
from dalsegno.errors import OptionError
from dalsegno.testing.builders import make_layout, make_request, run_all
from tests.scenarios.toy import Toy, random_prompt


@pytest.mark.parametrize(("block_size", "unit"), list(itertools.product([1, 15, 16, 24, 32, 48, 1024], [1, 8, 16, 24])))
def test_a_block_is_a_multiple_of_the_unit_or_refused_with_the_nearest_that_are(block_size: int, unit: int) -> None:
    """89: a failure in three stages, each naming half of what was wrong."""
    options: dict[str, Any] = {"decode_checkpoint_interval": 0}
    if block_size % unit == 0:
        config = CacheConfig(block_size, unit, **options)
        toy = Toy(config=config, max_model_len=100)
        run_all(toy.core, [make_request("r", random_prompt(70), 3)])
        assert toy.hit(random_prompt(70)) == 69 // unit * unit
        return
    with pytest.raises(OptionError) as caught:
        CacheConfig(block_size, unit, **options)
    message = str(caught.value)
    near = [size for size in (block_size - block_size % unit, block_size - block_size % unit + unit) if size]
    assert f"hash_block_size={unit}" in message
    assert f"got {block_size}" in message
    assert all(str(size) in message for size in near)
    assert all(CacheConfig(size, unit, **options) for size in near)


@pytest.mark.parametrize("name", ["prefix_cache_retention_interval", "decode_checkpoint_interval"])
@pytest.mark.parametrize("value", [-16, 1, 17, 24, None, 1.5, True])
def test_an_interval_is_a_multiple_of_the_unit_or_refused(name: str, value: Any) -> None:
    """89"""
    with pytest.raises(OptionError, match=rf"{name}"):
        CacheConfig(**{name: value})


@pytest.mark.parametrize("name", ["block_size", "hash_block_size"])
@pytest.mark.parametrize("value", [0, -1, None, 16.0, "16", True])
def test_a_size_is_a_positive_integer_or_refused(name: str, value: Any) -> None:
    """89"""
    with pytest.raises(OptionError, match=name):
        CacheConfig(**{name: value})


@pytest.mark.parametrize("value", [-1, None, 2.0])
def test_a_number_of_states_is_none_or_more_or_refused(value: Any) -> None:
    """89"""
    with pytest.raises(OptionError, match="max_states_per_request"):
        CacheConfig(max_states_per_request=value)


@pytest.mark.parametrize("num_slabs", [2, 3, 5, 8])
def test_memory_that_is_too_small_is_refused_at_the_start_and_what_is_named_is_enough(num_slabs: int) -> None:
    """89: and the number that is named works."""
    config = CacheConfig(block_size=64)
    layout = make_layout("as", config, num_slabs=num_slabs)
    with pytest.raises(OptionError, match=r"kv_cache_memory_bytes to at least (\d+)") as caught:
        Toy(layout=layout, config=config, max_model_len=2000)
    enough = int(str(caught.value).rsplit(" ", 1)[1])
    assert enough % layout.slab_bytes == 0
    Toy(layout=layout.with_slabs(enough // layout.slab_bytes), config=config, max_model_len=2000)
    with pytest.raises(OptionError):
        Toy(layout=layout.with_slabs(enough // layout.slab_bytes - 1), config=config, max_model_len=2000)
