"""Random workloads for the engine core over the fake worker, and what must hold whatever happens in them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hypothesis import strategies as st

from dalsegno.config import CacheConfig
from dalsegno.engine.core import EngineCore, RequestUpdate
from dalsegno.kv.layout import MemoryLayout
from dalsegno.request import FinishReason, Request, RequestStatus
from dalsegno.sampling_params import SamplingParams
from dalsegno.sched.cold_checks import ColdCheckSetup, Mismatch
from dalsegno.testing.builders import STALL_STEPS, layout_alone, make_core, make_cut, make_request
from dalsegno.testing.fake_worker import (
    FakeWorker,
    expected_logprobs,
    expected_prompt_logprobs,
    expected_tokens,
    extend_cells,
)
from dalsegno.testing.oracles import audit_published
from dalsegno.types import BlockHash, StepPlan

GAUGES = ("num_slabs", "num_reclaimable_slabs", "num_empty_slabs", "num_cached_blocks", "kv_cache_usage_perc")


@dataclass(frozen=True)
class Arrival:
    """One prompt: where its tokens come from, what it asks for, and what happens before the next one arrives."""

    base: int
    cut: int
    tail: int
    max_tokens: int
    samples: int
    priority: int
    salt: str | None
    marks: tuple[int, ...]
    steps_after: int
    then: str
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class Workload:
    """A whole run, small enough to read when it fails."""

    kinds: str
    blocks_per_slab: tuple[int, ...]
    units_per_block: int
    window: int
    unit: int
    max_model_len: int
    budget: int
    max_num_seqs: int
    policy: str
    prefix_wait_steps: int
    checked_share: float
    extra_slabs: str
    interval: int
    retention: int
    max_states: int
    caching: bool
    failing_steps: frozenset[int]
    arrivals: tuple[Arrival, ...]

    @property
    def config(self) -> CacheConfig:
        return CacheConfig(
            block_size=self.unit * self.units_per_block,
            hash_block_size=self.unit,
            enable_prefix_caching=self.caching,
            decode_checkpoint_interval=self.unit * self.interval,
            prefix_cache_retention_interval=self.unit * self.retention,
            max_states_per_request=self.max_states,
        )

    def layout(self) -> MemoryLayout:
        """Exactly what the largest request needs, or that and one slab more, twice or ten times as much."""
        layout = make_cut(
            self.kinds,
            self.blocks_per_slab[: len(self.kinds)],
            block_size=self.config.block_size,
            hash_block_size=self.unit,
            window=self.window,
        )
        need = layout_alone(layout, self.config, max_model_len=self.max_model_len, budget=self.budget)
        return layout.with_slabs(
            {"none": need, "one": need + 1, "twice": 2 * need, "ten times": 10 * need}[self.extra_slabs]
        )


@st.composite
def arrivals(draw: st.DrawFn, max_model_len: int, may_fail: bool) -> Arrival:
    return Arrival(
        base=draw(st.integers(0, 3)),
        cut=draw(st.integers(0, max_model_len - 1)),
        tail=draw(st.sampled_from([0, 0, 1, 5, 40])),
        max_tokens=draw(st.sampled_from([1, 1, 3, 20, 45, max_model_len])),
        samples=draw(st.sampled_from([1, 1, 1, 2, 4])),
        priority=draw(st.integers(0, 2)),
        salt=draw(st.sampled_from([None, None, "x"])),
        marks=tuple(draw(st.lists(st.integers(1, max_model_len), max_size=2))),
        steps_after=draw(st.sampled_from([0, 1, 3, 10, 1000])),
        then=draw(st.sampled_from(["nothing", "nothing", "abort", "stop", "preempt", "reset"]))
        if may_fail
        else "nothing",
        logprobs=draw(st.sampled_from([None, None, None, 1])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, None, None, 0, 1])),
    )


@st.composite
def workloads(draw: st.DrawFn, *, may_fail: bool = True, caching: bool | None = None) -> Workload:
    """Draw a workload; without `may_fail` nothing is aborted, preempted from outside or raised."""
    max_model_len = draw(st.sampled_from([40, 90, 150]))
    return Workload(
        kinds=draw(st.sampled_from(["as", "aws", "a", "aw", "s", "ws", "w"])),
        blocks_per_slab=tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=3, max_size=3))),
        units_per_block=draw(st.sampled_from([1, 2, 4])),
        window=draw(st.sampled_from([2, 7, 16, 40, 100])),
        unit=draw(st.sampled_from([4, 16])),
        max_model_len=max_model_len,
        budget=draw(st.sampled_from([5, 7, 16, 24, 64, 256])),
        max_num_seqs=draw(st.sampled_from([1, 2, 3, 64])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        prefix_wait_steps=draw(st.sampled_from([0, 1, 3, 64])),
        checked_share=draw(st.sampled_from([0.0, 0.5, 1.0])),
        extra_slabs=draw(st.sampled_from(["none", "one", "twice", "ten times"])),
        interval=draw(st.sampled_from([0, 1, 2])),
        retention=draw(st.sampled_from([0, 0, 2])),
        max_states=draw(st.sampled_from([0, 1, 2, 16, 16])),
        caching=draw(st.sampled_from([True] * 7 + [False])) if caching is None else caching,
        failing_steps=draw(st.frozensets(st.integers(1, 80), max_size=3)) if may_fail else frozenset(),
        arrivals=tuple(draw(st.lists(arrivals(max_model_len, may_fail), min_size=1, max_size=10))),
    )


@contextmanager
def quiet_log() -> Iterator[None]:
    """Planted failures are logged with a traceback each; a thousand of them help nobody."""
    logger = logging.getLogger("dalsegno.engine.core")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@dataclass
class Run:
    """Plays a workload, checking everything that can be checked after every step."""

    workload: Workload
    requests: list[Request] = field(default_factory=list)
    asked: dict[str, int] = field(default_factory=dict)
    mismatches: list[Mismatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = self.workload.config
        self.core: EngineCore = make_core(
            self.workload.layout(),
            self.config,
            max_model_len=self.workload.max_model_len,
            budget=self.workload.budget,
            max_num_seqs=self.workload.max_num_seqs,
            policy=self.workload.policy,
            prefix_wait_steps=self.workload.prefix_wait_steps,
            cold_checks=ColdCheckSetup(self.workload.checked_share, report=self.mismatches.append),
        )
        assert isinstance(self.core.worker, FakeWorker)
        self.worker = self.core.worker
        self.worker.before_step = self.before_step
        self.bases = [[(7 * i + 3 * base) % 50 for i in range(self.workload.max_model_len)] for base in range(3)]
        self.cells: dict[BlockHash, list[int]] = {}
        self.counters: dict[str, int | float] = {}
        self.num_plans = 0
        self.num_idle = 0

    def before_step(self, plan: StepPlan) -> None:
        self.num_plans += 1
        ids = [part.request_id for part in plan.requests]
        assert len(set(ids)) == len(ids)
        assert 0 < plan.num_tokens <= self.workload.budget
        assert all(len(part.token_ids) > 0 for part in plan.requests)
        if self.num_plans in self.workload.failing_steps:
            raise ValueError("planted")

    def play(self) -> "Run":
        with quiet_log():
            for number, arrival in enumerate(self.workload.arrivals):
                self.arrive(number, arrival)
            while self.core.has_unfinished_requests:
                self.step()
            while self.core.has_pending_checks:
                assert self.core.step() == []
        self.check_end()
        assert self.mismatches == []
        return self

    def arrive(self, number: int, arrival: Arrival) -> None:
        finished = [r.token_ids.tolist() for r in self.requests if r.status is RequestStatus.FINISHED]
        bases = [*self.bases, *finished[-1:]]
        prompt = bases[arrival.base % len(bases)][: arrival.cut] + [60 + number] * arrival.tail
        prompt = (prompt or [1])[: self.workload.max_model_len - 1]
        max_tokens = min(arrival.max_tokens, self.workload.max_model_len - len(prompt))
        request = make_request(
            f"r{number}",
            prompt,
            max_tokens,
            n=arrival.samples,
            params=SamplingParams(
                temperature=0,
                max_tokens=max_tokens,
                n=arrival.samples,
                logprobs=arrival.logprobs,
                prompt_logprobs=arrival.prompt_logprobs,
            ),
            priority=arrival.priority,
            cache_salt=arrival.salt,
            checkpoint_at=arrival.marks,
        )
        samples = [request, *request.siblings]
        self.asked |= {sample.request_id: max_tokens for sample in samples}
        self.requests += samples
        self.core.add_request(request)
        for _ in range(arrival.steps_after):
            if self.core.has_unfinished_requests:
                self.step()
        self.interfere(arrival, request)

    def interfere(self, arrival: Arrival, request: Request) -> None:
        if arrival.then == "abort":
            self.core.abort(self.requests[arrival.cut % len(self.requests)].request_id)
        elif arrival.then == "stop":
            self.core.stop(request.request_id, "a stop string")
        elif arrival.then == "preempt" and self.core.scheduler.running:
            running = self.core.scheduler.running
            self.core.scheduler._preempt(running[arrival.cut % len(running)])
        elif arrival.then == "reset":
            in_use = bool(self.core.scheduler.running)
            assert self.core.reset_prefix_cache() == (not in_use)

    def step(self) -> list[RequestUpdate]:
        updates = self.core.step()
        moved = any(update.new_token_ids or update.finished for update in updates)
        self.num_idle = 0 if moved else self.num_idle + 1
        # A failed or preempted prefill starts over; the slowest here takes thirty steps.
        assert self.num_idle < STALL_STEPS, f"no token for {self.num_idle} steps: {self.core.stats()}"
        self.check_counters()
        self.learn()
        audit_published(self.core.manager, self.worker, self.cells)
        return updates

    def check_counters(self) -> None:
        """SCENARIOS 85: no counter ever goes back."""
        counters = {name: value for name, value in self.core.stats().items() if not self.is_gauge(name)}
        assert all(counters.get(name, 0) >= value for name, value in self.counters.items())
        assert all(value >= 0 for value in counters.values())
        self.counters = counters

    def is_gauge(self, name: str) -> bool:
        return name in GAUGES or name.startswith("num_requests_")

    def learn(self) -> None:
        unit = self.config.hash_block_size
        for request in self.requests:
            if request.block_hashes and request.block_hashes[-1] not in self.cells:
                cells: list[int] = []
                extend_cells(cells, request.token_ids)
                for count, block_hash in enumerate(request.block_hashes, 1):
                    self.cells[block_hash] = cells[: count * unit]

    def check_end(self) -> None:
        may_end_with_an_error = len(self.workload.failing_steps) > 1
        for request in self.requests:
            assert request.status is RequestStatus.FINISHED
            self.check_rows(request)
            reason = request.finish_reason
            assert reason is not FinishReason.ERROR or may_end_with_an_error, request.error
            assert request.output_token_ids == self.cold_answer(request), f"{request.request_id} answers differently"
            if reason is FinishReason.LENGTH:
                assert request.num_output_tokens == self.asked[request.request_id]
            if request.sample_index == 0 and request.num_cached_tokens is not None:
                report = request.hit_report
                assert report.boundary == request.num_cached_tokens
                assert report.boundary + sum(report.lost.values()) == request.num_prompt_tokens
        self.check_idle()

    def check_rows(self, request: Request) -> None:
        """Rows are those of a cold run, one per token, and nobody who asks for rows of the prompt has a hit."""
        layout, vocab_size = self.core.layout, self.worker.vocab_size
        prompt = request.token_ids[: request.num_prompt_tokens].tolist()
        count = request.params.logprobs
        known = [*prompt, *request.output_token_ids]
        assert request.logprobs == [
            expected_logprobs(layout, known[: i + 1], count, vocab_size)
            for i in range(len(prompt), len(known))
            if count is not None
        ]
        count = request.params.prompt_logprobs
        if count is None or request.sample_index or len(prompt) == 1:
            assert request.prompt_logprobs == []
            return
        expected = expected_prompt_logprobs(layout, prompt, count, vocab_size)
        rows = request.prompt_logprobs
        assert rows == expected[: len(rows)]
        assert len(rows) == len(expected) or not request.num_output_tokens
        assert not request.num_cached_tokens

    def cold_answer(self, request: Request) -> list[int]:
        prompt = request.token_ids[: request.num_prompt_tokens].tolist()
        return expected_tokens(
            self.core.layout, prompt, request.num_output_tokens, self.worker.vocab_size, request.sample_index
        )

    def check_idle(self) -> None:
        """R5: nothing is held, nothing is remembered of any request, and all memory can be had back."""
        self.core.step()
        self.core.verify()
        scheduler = self.core.scheduler
        assert [scheduler.waiting, scheduler.running, self.core._aborts, self.core._stops] == [[], [], [], []]
        assert scheduler._suspects == {}
        assert self.core.reset_prefix_cache()
        assert self.core.stats()["num_empty_slabs"] == self.core.layout.num_slabs - 1
        assert not list(self.core.manager.index.tree)
