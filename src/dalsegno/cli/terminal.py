"""Small things every command says on stderr, apart from its answer on stdout."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dalsegno.engine.outputs import RequestOutput

__all__ = ["note", "status", "summary", "why_lost"]


def note(text: str) -> None:
    """Write a line of explanation to stderr, dim where that is a terminal."""
    sys.stderr.write(f"\x1b[2m{text}\x1b[0m\n" if sys.stderr.isatty() else f"{text}\n")
    sys.stderr.flush()


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal's stderr what is being done; yields a function that changes the text."""
    from rich.console import Console

    with Console(stderr=True).status(text) as shown:
        yield shown.update


def why_lost(output: RequestOutput) -> str:
    """Return which prompt tokens were no hit and why, such as "diverged 176, sub_unit 10"; empty where unknown."""
    lost = output.hit_report.lost if output.hit_report is not None else {}
    return ", ".join(f"{reason} {num_tokens}" for reason, num_tokens in lost.items())


def summary(output: RequestOutput) -> str:
    """Return one line about a result: tokens in and out, what was cached, why not more, time to the first token."""
    metrics = output.metrics
    num_generated = sum(len(answer.token_ids) for answer in output.outputs)
    num_prompt = len(output.prompt_token_ids)
    reasons = why_lost(output)
    parts = [
        f"{num_prompt} prompt token{'' if num_prompt == 1 else 's'}",
        f"{output.num_cached_tokens or 0} cached",
        f"{metrics.num_prefilled_tokens} prefilled" + (f" ({reasons})" if reasons else ""),
        f"{num_generated} generated",
    ]
    if metrics.time_to_first_token is not None:
        parts.append(f"first token after {metrics.time_to_first_token:.2f} s")
    if metrics.finish_time is not None and metrics.first_token_time is not None:
        seconds = metrics.finish_time - metrics.first_token_time
        if num_generated > 1 and seconds > 0:
            parts.append(f"{(num_generated - 1) / seconds:.0f} tokens/s")
    return "[" + ", ".join(parts) + "]"
