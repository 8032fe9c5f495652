"""One workload that meets every way a prefix can be met again, and its cold answers.

Phases run one after the other; the requests of a phase arrive together. Prompts of later phases build on the *cold*
answers, so every cell of the matrix sees the same prompts.
"""

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dalsegno.config import CacheConfig, SchedulerConfig
from dalsegno.connector.base import WorkerConnector
from dalsegno.engine.core import EngineCore
from dalsegno.hashing.block_hash import to_token_array
from dalsegno.kv.layout import plan_layout
from dalsegno.kv.manager import KVCacheManager
from dalsegno.request import FinishReason, Request
from dalsegno.sampling_params import SamplingParams
from tests.matrix.backends import Backend, Row
from tests.matrix.stores import PATIENCE_S, RANKS, connect

UNIT = 16
MAX_MODEL_LEN = 256
_STALL_STEPS = 200


@dataclass(frozen=True)
class Prompt:
    """One request of the workload."""

    name: str
    token_ids: tuple[int, ...]
    max_tokens: int
    salt: str | None = None
    checkpoint_at: tuple[int, ...] = ()
    samples: int = 1


@dataclass(frozen=True)
class Cell:
    """One setting of every switch."""

    caching: bool = True
    budget: int = 512
    pool: str = "large"
    preempt_every: int = 0
    block_size: int = UNIT
    together: bool = True
    interval: int = UNIT
    store: str = "none"
    ranks: str = "1"


@dataclass
class Answers:
    """What a run answered: tokens and, where the backend has any, the logits each token was sampled from."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logits: dict[str, dict[int, Row]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    prefilled: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0


def build_phases(backend: Backend, cold: Callable[[Prompt], list[int]], seed: int = 0) -> list[list[Prompt]]:
    """Make the phases; `cold` answers a prompt without any cache."""
    rng = random.Random(seed)

    def fresh(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(backend.vocab_size) for _ in range(count))

    shared = fresh(75)
    aligned = Prompt("aligned", shared + fresh(37), 12)
    short = Prompt("short", fresh(20), 9)
    ragged = Prompt("ragged", fresh(44), 20)
    first = [aligned, short, ragged, Prompt("marked", fresh(90), 4, checkpoint_at=(35, 64))]
    turn = aligned.token_ids + tuple(cold(aligned)) + fresh(9)
    ragged_turn = ragged.token_ids + tuple(cold(ragged)) + fresh(23)
    twin = fresh(70)
    second = [
        Prompt("resend", aligned.token_ids, 12),
        Prompt("extended by 1", aligned.token_ids + fresh(1), 6),
        Prompt("extended by H", ragged.token_ids + fresh(16), 6),
        Prompt("shared, second", shared + fresh(30), 6),
        Prompt("short again", short.token_ids, 9),
    ]
    third = [
        Prompt("shared, third", shared + fresh(45), 6),
        Prompt("next turn", turn, 17),
        Prompt("next turn, ragged", ragged_turn, 5),
        Prompt("diverges inside a unit", aligned.token_ids[:100] + fresh(20), 5),
        Prompt("twin", twin, 5),
        Prompt("twin too", twin, 5),
        Prompt("mark shared", first[3].token_ids[:70] + fresh(5), 5),
    ]
    fourth = [
        Prompt("long", shared + fresh(130), 8),
        Prompt("next turn again", turn, 6),
        Prompt("other salt", aligned.token_ids, 6, salt="x"),
        Prompt("samples", shared + fresh(21), 6, samples=3),
        Prompt("diverges after the turn", turn[:-4] + fresh(18), 5),
    ]
    return [first, second, third, fourth]


def run_cell(
    backend: Backend, cell: Cell, phases: list[list[Prompt]], fault: Callable[[EngineCore], None] | None = None
) -> Answers:
    """Run the workload under one setting; AssertionError if the engine stalls, leaks or checks itself red."""
    config = CacheConfig(
        block_size=cell.block_size,
        hash_block_size=UNIT,
        enable_prefix_caching=cell.caching,
        decode_checkpoint_interval=cell.interval,
    )
    scheduling = SchedulerConfig(MAX_MODEL_LEN, cell.budget)
    layout = plan_layout(backend.specs, config, num_slabs=2)
    need = KVCacheManager(layout, config, max_step_tokens=cell.budget).slabs_alone(MAX_MODEL_LEN)
    slabs = {"need": need, "one more": need + 1, "double": 2 * need, "large": 10 * need}[cell.pool]
    layout = layout.with_slabs(slabs + 1)
    answers = Answers()
    with tempfile.TemporaryDirectory() as folder:
        setup = None
        connectors: Sequence[WorkerConnector] = ()
        if cell.store != "none" and cell.caching:
            setup, connectors = connect(
                cell.store, cell.ranks, layout, config, backend.clock, backend.name, Path(folder)
            )
        worker = backend.worker(layout, answers.logits, connectors, RANKS[cell.ranks][1])
        core = EngineCore(worker, backend.clock, layout, config, scheduling, debug=True, connector=setup)
        if fault is not None:
            fault(core)
        run_phases(core, backend, cell, phases, answers)
        core.verify()
        core.close()
    return answers


def run_phases(core: EngineCore, backend: Backend, cell: Cell, phases: list[list[Prompt]], answers: Answers) -> None:
    """Run the phases, or every prompt by itself; with a store the device forgets everything in between."""
    batches = phases if cell.together else [[prompt] for phase in phases for prompt in phase]
    for batch in batches:
        requests = [request for prompt in batch for request in add(core, backend, prompt)]
        _run(core, cell.preempt_every)
        for request in requests:
            assert request.finish_reason is FinishReason.LENGTH, f"{request.request_id}: {request.error}"
            answers.tokens[request.request_id] = request.output_token_ids
            answers.cached[request.request_id] = request.num_cached_tokens or 0
            answers.prefilled[request.request_id] = request.num_prefilled_tokens
            answers.preemptions += request.num_preemptions
        if cell.store != "none":
            reported = "dead" in cell.ranks or core.wait_for_connector(PATIENCE_S)
            assert reported, f"store jobs without an end: {core.stats()}"
            assert core.reset_prefix_cache()


def add(core: EngineCore, backend: Backend, prompt: Prompt) -> list[Request]:
    """Queue all samples of a prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=prompt.max_tokens, n=prompt.samples)
    requests = [
        Request(
            request_id=prompt.name if sample == 0 else f"{prompt.name} #{sample}",
            token_ids=to_token_array(prompt.token_ids),
            params=params,
            arrival_time=0.0,
            cache_salt=prompt.salt,
            checkpoint_at=prompt.checkpoint_at,
            max_tokens=prompt.max_tokens,
            sample_index=sample * backend.sample_stride,
        )
        for sample in range(prompt.samples)
    ]
    requests[0].siblings = requests[1:]
    core.add_request(requests[0])
    return requests


def _run(core: EngineCore, preempt_every: int) -> None:
    step = silent = 0
    while core.has_unfinished_requests:
        step += 1
        if preempt_every and step % preempt_every == 0 and len(core.scheduler.running) > 1:
            core.scheduler._preempt(core.scheduler.running[-1])
        silent = 0 if any(update.new_token_ids for update in core.step()) else silent + 1
        assert silent < _STALL_STEPS, f"no token for {_STALL_STEPS} steps"
