"""The demo's second half: what one process computed, another one resumes through a store on disk."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dalsegno.cli.conversations import RecordedConversation
from dalsegno.cli.demo_process import DemoAnswer, DemoJob, run_in_process
from dalsegno.cli.terminal import status

if TYPE_CHECKING:
    from dalsegno.engine.outputs import RequestOutput

__all__ = ["StoreTurn", "resume_from_store", "store_table"]

_LAST_TURNS = 3


@dataclass(frozen=True, slots=True)
class StoreTurn:
    """One turn answered by a process that computed none of its prefix.

    Attributes:
        what: who answered.
        answer: what it answered.
        cold: the turn without any cache.
    """

    what: str
    answer: DemoAnswer
    cold: "RequestOutput"

    @property
    def same_answer(self) -> bool:
        """Whether the store changed nothing."""
        return self.answer.error is None and self.answer.token_ids == list(self.cold.outputs[0].token_ids)


def resume_from_store(
    model: Path, store: Path, conversation: RecordedConversation, cold: "Sequence[RequestOutput]", max_tokens: int
) -> list[StoreTurn]:
    """Answer the conversation's last turns in new processes.

    First on the store an engine that has ended left behind, then on a new one that a producer of one token fills.

    Args:
        model: folder of the model.
        store: folder of the store; a new one is made beside it.
        conversation: what is played.
        cold: its turns without cache, to compare with.
        max_tokens: tokens per answer.
    """
    turns = conversation.turns()[-_LAST_TURNS:]
    expected = cold[-_LAST_TURNS:]

    def answer(messages: list[list[dict[str, Any]]], num_tokens: int, **options: Any) -> list[DemoAnswer]:
        return run_in_process(DemoJob(str(model), {"threads": 1, **options}, messages, conversation.tools, num_tokens))

    def on(role: str) -> dict[str, Any]:
        settings = {"store": "embedded", "path": str(store.with_name("producer-store"))}
        return {"kv_connector": "StoreConnector", "kv_role": role, "kv_connector_extra_config": settings}

    with status("a new process on the same store"):
        resumed = answer(turns, max_tokens, kv_store=str(store))
    with status("a producer process, then a consumer process"):
        answer(turns[-1:], 1, kv_transfer_config=on("kv_producer"))
        consumed = answer(turns[-1:], max_tokens, kv_transfer_config=on("kv_consumer"))
    found = [StoreTurn("after a restart", *pair) for pair in zip(resumed, expected, strict=True)]
    return [*found, StoreTurn("behind a producer", consumed[0], expected[-1])]


def store_table(turns: Sequence[StoreTurn]) -> Table:
    """Show what each process found and how long it took."""
    table = Table(title="The last turns in other processes, on a store on disk", title_justify="left")
    for heading in ("process", "prompt tokens", "from the store", "from memory", "first token, cold", "first token"):
        table.add_column(heading, justify="left" if heading == "process" else "right")
    table.add_column("same answer")
    for turn in turns:
        cold = turn.cold.metrics.time_to_first_token or 0.0
        table.add_row(
            turn.what,
            str(turn.answer.num_prompt_tokens),
            str(turn.answer.by_tier.get("store", 0)),
            str(turn.answer.by_tier.get("device", 0)),
            f"{1000 * cold:.0f} ms",
            f"{1000 * turn.answer.time_to_first_token:.0f} ms",
            "yes" if turn.same_answer else "[bold red]NO[/]",
        )
    return table
