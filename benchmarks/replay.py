"""Replaying recorded dialogues through `LLM.chat`: what was cached, what could have been, and whether answers agree.

The bound is what a cache that never forgets anything could give: per prompt the longest prefix it shares with any
earlier prompt, floored to the hash unit, with at least one token left to compute. It is found by comparing token ids
pair by pair and shares no code with the engine.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dalsegno import LLM, SamplingParams
from dalsegno.cli.conversations import TRACES_VARIABLE, RecordedConversation, load_conversation
from dalsegno.errors import RequestError
from dalsegno.worker.model_worker import ModelWorker

__all__ = [
    "TOLERANCE",
    "Agreement",
    "Served",
    "compare_with_cold",
    "infinite_cache_bound",
    "judge",
    "load_dialogues",
    "replay",
]

TOLERANCE = 1e-4
"""Rule R1: first-step logits agree to this times one plus the largest of the cold run."""

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Served:
    """One request of the replay: its prompt, the tokens that were cached, and the answer's first token and logits."""

    dialogue: str
    token_ids: list[int]
    cached: int
    lost: dict[str, int]
    token: int
    logits: Logits | None


@dataclass(slots=True)
class Agreement:
    """Sampled requests beside cold runs: how many, by how much of rule R1's bound they differ, and what broke it."""

    compared: int = 0
    cached_tokens: int = 0
    largest: float = 0.0
    ties: int = 0
    broken: list[str] = field(default_factory=list)


def load_dialogues(folder: Path, count: int) -> list[RecordedConversation]:
    """Return the first `count` dialogues of the trace folder, fewer where it holds no more."""
    environment = {TRACES_VARIABLE: str(folder)}
    dialogues = [load_conversation(0, environment)]
    for session in range(1, count):
        try:
            dialogues.append(load_conversation(session, environment))
        except RequestError:
            break
    return dialogues


def replay(llm: LLM, dialogues: Sequence[RecordedConversation], params: SamplingParams) -> Iterator[Served]:
    """Ask for every answer of every dialogue in order, recorded answers in the prompts, and yield what was served."""
    with _Rows(llm) as rows:
        for dialogue in dialogues:
            for turn in dialogue.turns():
                [result] = llm.chat(turn, params, use_tqdm=False, tools=dialogue.tools)
                assert result.hit_report is not None, "a finished request has a hit report"
                yield Served(
                    dialogue=dialogue.name,
                    token_ids=result.prompt_token_ids,
                    cached=result.num_cached_tokens or 0,
                    lost=result.hit_report.lost,
                    token=result.outputs[0].token_ids[0],
                    logits=rows.last,
                )


def infinite_cache_bound(prompts: Sequence[Sequence[int]], unit: int) -> list[int]:
    """Return per prompt the tokens a cache that never forgets could give, every boundary of `unit` being resumable."""
    known: list[npt.NDArray[np.uint32]] = []
    bounds = []
    for prompt in prompts:
        ids = np.asarray(prompt, dtype=np.uint32)
        shared = max((_common(ids, other) for other in known), default=0)
        bounds.append(min(shared, len(ids) - 1) // unit * unit)
        known.append(ids)
    return bounds


def compare_with_cold(cold: LLM, served: Sequence[Served], count: int, params: SamplingParams) -> Agreement:
    """Run `count` requests that hit, drawn with a fixed seed, on an engine without cache and compare under rule R1."""
    hits = [request for request in served if request.cached and request.logits is not None]
    agreement = Agreement()
    with _Rows(cold) as rows:
        for request in random.Random(0).sample(hits, min(count, len(hits))):
            [result] = cold.generate([request.token_ids], params, use_tqdm=False)
            assert not result.num_cached_tokens, "the engine to compare with has a cache"
            assert rows.last is not None, "the engine to compare with has a model"
            judge(agreement, request, rows.last, result.outputs[0].token_ids[0])
    return agreement


def judge(agreement: Agreement, request: Served, cold: Logits, token: int) -> None:
    """Compare a request with the logits and the token of a cold run; modifies `agreement`."""
    assert request.logits is not None, "only requests with logits are compared"
    bound = TOLERANCE * (1.0 + float(np.abs(cold).max()))
    difference = float(np.abs(request.logits - cold).max())
    agreement.compared += 1
    agreement.cached_tokens += request.cached
    agreement.largest = max(agreement.largest, difference / bound)
    where = f"{request.dialogue}, {len(request.token_ids)} tokens, {request.cached} cached"
    if not difference <= bound:
        agreement.broken.append(f"{where}: logits differ by {difference:.3g}, allowed are {bound:.3g}")
    if request.token != token:
        second, best = np.sort(cold)[-2:]
        if best - second < bound:
            agreement.ties += 1
        else:
            agreement.broken.append(f"{where}: token {request.token}, cold {token}")


def _common(left: npt.NDArray[np.uint32], right: npt.NDArray[np.uint32]) -> int:
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length


class _Rows:
    """Watches the logits an engine samples from; `last` stays None on a worker without a model."""

    def __init__(self, llm: LLM) -> None:
        self._worker = llm.core.worker
        self.last: Logits | None = None

    def __enter__(self) -> "_Rows":
        if isinstance(self._worker, ModelWorker):
            self._worker.logits_observer = self._observe
        return self

    def __exit__(self, *raised: object) -> None:
        if isinstance(self._worker, ModelWorker):
            self._worker.logits_observer = None

    def _observe(self, request_id: str, position: int, row: Any) -> None:
        self.last = row.float().numpy().copy()
