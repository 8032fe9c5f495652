"""`dalsegno demo`: one conversation on a tiny hybrid model, played with caching off and on, and compared turn by turn.

Then the engine is gone, and other processes go on from what it left in a store on disk (`demo_store.py`).

Every turn's prompt is the rendering of the recorded messages so far, so each one extends the one before it. The answers
are the tiny model's own babble; what counts is that caching does not change them.
"""

import functools
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from dalsegno.cli.conversations import RecordedConversation, load_conversation
from dalsegno.cli.demo_store import StoreTurn, resume_from_store, store_table
from dalsegno.cli.terminal import status, why_lost
from dalsegno.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dalsegno.engine.llm import LLM
    from dalsegno.engine.outputs import RequestOutput

__all__ = ["DemoTurn", "compare_turns", "report", "run_demo"]

_KIND = "qwen3-next"
_PLAIN_WIDTH = 140


@dataclass(frozen=True, slots=True)
class DemoTurn:
    """One turn without and with caching."""

    cold: "RequestOutput"
    warm: "RequestOutput"

    @property
    def same_answer(self) -> bool:
        """Whether both gave an answer, and caching changed nothing."""
        cold, warm = self.cold.outputs[0], self.warm.outputs[0]
        return cold.error is None and warm.error is None and cold.token_ids == warm.token_ids


def run_demo(*, session: int = 0, max_tokens: int = 16, llm_factory: "Callable[..., LLM] | None" = None) -> int:
    """Build a tiny model, play a conversation twice, print the comparison.

    Args:
        session: which recorded conversation, where a folder of them is named.
        max_tokens: tokens per answer.
        llm_factory: makes the engines, called as `LLM(model, **options)`; `LLM` itself by default.

    Returns:
        The exit status: 0, or 1 if an answer differs.

    Raises:
        UserError: the recorded conversation cannot be read.
    """
    conversation = load_conversation(session)
    with tempfile.TemporaryDirectory(prefix="dalsegno-demo-") as folder:
        model = Path(folder) / _KIND
        with status(f"building a tiny {_KIND} model"):
            from dalsegno.engine.llm import LLM
            from dalsegno.models.tiny import make_tiny_model

            make_tiny_model(_KIND, model)
        factory = LLM if llm_factory is None else llm_factory
        # In so small a model several threads would mostly wait for each other.
        store = Path(folder) / "store"
        turns = compare_turns(functools.partial(factory, model, threads=1), conversation, max_tokens, store)
        stored = resume_from_store(model, store, conversation, [turn.cold for turn in turns], max_tokens)
    return report(conversation, turns, stored)


def compare_turns(
    llm_factory: "Callable[..., LLM]", conversation: RecordedConversation, max_tokens: int, store: Path | None = None
) -> list[DemoTurn]:
    """Play a conversation with caching off, then on, each with an engine of its own.

    Args:
        llm_factory: makes an engine, called with `enable_prefix_caching`.
        conversation: its answers are not compared with, they only lead to the next turn.
        max_tokens: tokens per answer.
        store: where the second engine leaves what it computed; None leaves it nowhere.
    """
    played: list[list[RequestOutput]] = []
    for caching in (False, True):
        options = {"kv_store": str(store)} if caching and store is not None else {}
        with llm_factory(enable_prefix_caching=caching, **options) as llm:
            played.append(_play(llm, conversation, max_tokens, "on" if caching else "off"))
            llm.verify()
    return [DemoTurn(cold, warm) for cold, warm in zip(*played, strict=True)]


def report(conversation: RecordedConversation, turns: list[DemoTurn], stored: Sequence[StoreTurn] = ()) -> int:
    """Print the comparison, and what other processes found; return the exit status, 1 if an answer differs."""
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    console.print(_table(conversation, turns))
    if stored:
        console.print(store_table(stored))
    console.print(_summary(turns, stored))
    return 1 if _num_different(turns, stored) else 0


def _play(llm: "LLM", conversation: RecordedConversation, max_tokens: int, label: str) -> "list[RequestOutput]":
    """Answer every turn, greedily, one after the other."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    # The first steps of a process are slow for reasons of their own; under a salt they leave nothing behind to hit.
    llm.generate({"prompt": "warm-up " * 40, "cache_salt": "warm-up"}, params, use_tqdm=False)
    turns = conversation.turns()
    outputs = []
    with status(f"caching {label}") as show:
        for number, messages in enumerate(turns, 1):
            show(f"caching {label}: turn {number} of {len(turns)}")
            outputs += llm.chat(messages, params, use_tqdm=False, tools=conversation.tools)
    return outputs


def _table(conversation: RecordedConversation, turns: list[DemoTurn]) -> Table:
    table = Table(title=f"{conversation.name}, {len(turns)} turns", title_justify="left")
    headings = ("turn", "prompt tokens", "cached", "prefilled", "first token, off", "first token, on")
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("same answer")
    table.add_column("the rest was not a hit because", ratio=1)
    for number, turn in enumerate(turns, 1):
        table.add_row(
            str(number),
            str(len(turn.warm.prompt_token_ids)),
            str(turn.warm.num_cached_tokens),
            str(turn.warm.metrics.num_prefilled_tokens),
            _milliseconds(turn.cold),
            _milliseconds(turn.warm),
            "yes" if turn.same_answer else "[bold red]NO[/]",
            why_lost(turn.warm) or "-",
        )
    return table


def _summary(turns: list[DemoTurn], stored: Sequence[StoreTurn]) -> str:
    num_prompt = sum(len(turn.warm.prompt_token_ids) for turn in turns)
    num_cached = sum(turn.warm.num_cached_tokens or 0 for turn in turns)
    cold, warm = (
        sum(output.metrics.time_to_first_token or 0.0 for output in outputs)
        for outputs in ([turn.cold for turn in turns], [turn.warm for turn in turns])
    )
    num_different = _num_different(turns, stored)
    verdict = (
        "Every answer is the same."
        if not num_different
        else f"[bold red]{num_different} of {len(turns) + len(stored)} answers differ: this must not happen.[/]"
    )
    return (
        f"{num_cached} of {num_prompt} prompt tokens ({100 * num_cached / num_prompt:.1f} %) came from the cache. "
        f"All first tokens together took {cold:.2f} s without it and {warm:.2f} s with it.\n{verdict}"
    )


def _num_different(turns: Sequence[DemoTurn], stored: Sequence[StoreTurn]) -> int:
    return sum(not turn.same_answer for turn in turns) + sum(not turn.same_answer for turn in stored)


def _milliseconds(output: "RequestOutput") -> str:
    seconds = output.metrics.time_to_first_token
    return "-" if seconds is None else f"{1000 * seconds:.0f} ms"
