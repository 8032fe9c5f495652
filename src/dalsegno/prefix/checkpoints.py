"""Which boundaries of a prompt are worth a boundary state. Pure policy: equal inputs give equal plans."""

from collections.abc import Iterable, Sequence

from dalsegno.config import CacheConfig

__all__ = ["checkpoint_boundaries", "prompt_state_budget"]


def prompt_state_budget(config: CacheConfig) -> int:
    """Most states a prompt may plan: one place is left for the answer's state where there are more than two."""
    places = config.max_states_per_request
    return places - 1 if places > 2 and config.decode_checkpoint_interval else places


def checkpoint_boundaries(
    num_prompt_tokens: int,
    num_tokens: int,
    hit: int,
    junction: int | None,
    marks: Sequence[int],
    config: CacheConfig,
) -> tuple[int, ...]:
    """Plan the boundaries of one admission, most valuable first.

    In order: *tails* (the largest boundary a resend can resume at; the end of what is known and the end of the prompt,
    where an extension resumes), the *junction*, the first *mark*, marks from the last, the *interval*.

    Args:
        num_prompt_tokens: n, tokens of the prompt.
        num_tokens: N >= n, tokens known at this admission (more than n after a preemption).
        hit: the boundary this admission resumes at; only later boundaries are planned.
        junction: boundary up to which attention matched beyond any kept state, if any.
        marks: token counts named by caller or chat template; floored to the unit here.
        config: the unit, the interval and the budget.

    Returns:
        Distinct multiples of H in `(hit, num_tokens]`, at most `prompt_state_budget(config)` of them.
    """
    unit = config.hash_block_size
    floored = sorted({mark - mark % unit for mark in marks if mark <= num_prompt_tokens})
    interval = config.prefix_cache_retention_interval

    def candidates() -> Iterable[int]:
        yield (num_tokens - 1) // unit * unit
        yield from (end for end in (num_tokens, num_prompt_tokens) if end % unit == 0)
        if junction is not None:
            yield junction
        yield from floored[:1]
        yield from reversed(floored[1:])
        if interval:
            yield from range(num_tokens // interval * interval, 0, -interval)

    planned = dict.fromkeys(boundary for boundary in candidates() if hit < boundary <= num_tokens)
    return tuple(planned)[: prompt_state_budget(config)]
