"""The scheduler: who runs in the next step, with how many tokens, and what the step's result means.

Continuous batching with chunked prefill under a token budget. Prefill and decode are no two code paths: a request with
one uncomputed token decodes. Nothing waiting holds a block. A plan is either committed or failed before the next is
made, so at most one step is in flight.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterable

from dalsegno.config import SchedulerConfig
from dalsegno.connector.base import ConnectorOutput
from dalsegno.hit_report import HitReport, LostReason
from dalsegno.kv.manager import KVCacheManager
from dalsegno.kv.tables import ComputedBlocks
from dalsegno.request import FinishReason, Request, RequestStatus, RequestUpdate
from dalsegno.sched.cold_checks import ColdChecks, ColdCheckSetup
from dalsegno.sched.connection import Connection
from dalsegno.sched.external import Decision
from dalsegno.sched.prefix_wait import PlannedBoundaries
from dalsegno.sched.sampling import finish_of, prompt_rows, sample_spec, take_row
from dalsegno.types import ScheduledRequest, StepPlan, StepResult

__all__ = ["Scheduler"]


_COUNTERS = (
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    *(f"prefix_cache_lost_tokens_{reason.value}" for reason in LostReason),
    *(f"request_success_{reason.value}" for reason in FinishReason),
    "num_prefilled_tokens",
    "num_recovered_tokens",
    "num_preemptions",
    "num_failed_steps",
    "num_prefix_wait_steps",
)


def _order(request: Request) -> tuple[int, int]:
    return request.order


class Scheduler:
    """Waiting and running requests. Owns no block: those are the manager's. Used on the engine thread only."""

    def __init__(
        self,
        manager: KVCacheManager,
        config: SchedulerConfig,
        connection: Connection,
        cold_checks: ColdCheckSetup | None = None,
    ) -> None:
        """Schedule on the blocks of `manager`, to which `connection` is bound."""
        self.checks = ColdChecks(manager, cold_checks or ColdCheckSetup())
        self.manager = manager
        self.config = config
        self.connection = connection
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self._unit = manager.unit
        self._num_added = 0
        self._unfinished: set[str] = set()
        self._step_id = 0
        # Requests of a step that raised, with the tokens they had reached: each runs alone until it is past them.
        self._suspects: dict[str, int] = {}

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits, loads or runs."""
        return bool(self.waiting or self.running or self.connection.loads.loading)

    def knows(self, request_id: str) -> bool:
        """Whether an unfinished request, or one whose table is kept, has this id."""
        return request_id in self._unfinished or self.connection.keeps(request_id) or self.checks.is_running(request_id)

    def add(self, request: Request) -> None:
        """Queue a request that fits alone; nobody unfinished has its id or that of one of its samples."""
        self._num_added += 1
        self._unfinished.update(sample.request_id for sample in (request, *request.siblings))
        request.order = (request.priority if self.config.policy == "priority" else 0, self._num_added)
        for sibling in request.siblings:
            sibling.order = request.order
        self.manager.start_request(request)
        insort(self.waiting, request, key=_order)

    def schedule(self) -> StepPlan | None:
        """Plan the next step, or None when nothing can run and the connector has nothing to say.

        Needs of running requests first (preempting the last ones while there is no room), then what they want of the
        state, then admissions, then exports: a wish is granted only from what no need of this step asks for. A cold
        check gets what is left.
        """
        scheduled: dict[Request, int] = {}
        solo = self._next_suspect()
        budget, preempted = self._schedule_running(scheduled, self.config.max_num_batched_tokens, solo)
        for request in scheduled:
            self.manager.grant_write(request)
        if not preempted:
            self._admit_waiting(scheduled, budget, solo)
        for request, num_tokens in scheduled.items():
            self.manager.grant_exports(request, num_tokens)
        if solo is None and not preempted:
            left = self.config.max_num_batched_tokens - sum(scheduled.values())
            scheduled |= self.checks.schedule(left, alone=not self.has_unfinished)
        if not scheduled and not self.connection.has_push_work:
            return None
        self._step_id += 1
        requests = tuple(self._planned(request, num_tokens) for request, num_tokens in scheduled.items())
        return self.connection.with_meta(StepPlan(self._step_id, requests, self.manager.take_copies()))

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestUpdate]:
        """The worker has returned: advance, publish, append tokens, finish."""
        self.manager.end_copies()
        running = {request.request_id: request for request in self.running}
        updates: list[RequestUpdate] = []
        for part in plan.requests:
            if self.checks.is_running(part.request_id):
                # Last in the plan, so that what it forgets is behind what the others have published.
                self.checks.commit(part, result)
                continue
            request = running[part.request_id]
            if part.start < request.prefill_target:
                request.num_prefilled_tokens += result.num_computed[part.request_id]
                self.counters["num_prefilled_tokens"] += result.num_computed[part.request_id]
            self.manager.commit(request, len(part.token_ids))
            request.prompt_logprobs += result.prompt_logprobs.get(part.request_id, ())
            if part.sample is not None:
                updates += self._append(request, result, now)
            if request.num_computed_tokens >= self._suspects.get(request.request_id, request.num_computed_tokens + 1):
                del self._suspects[request.request_id]
        self.connection.register_step({request.request_id: request for request in self.running})
        return updates

    def update_connector(self, output: ConnectorOutput, now: float) -> list[RequestUpdate]:
        """Take what the connector's worker side reports."""
        return self._return_loading(*self.connection.take(output), now)

    def expire_loads(self, now: float) -> list[RequestUpdate]:
        """Let requests go on whose load is overdue."""
        return self._return_loading(*self.connection.loads.expire(), now)

    def push_plan(self) -> StepPlan | None:
        """A step of no request that tells the worker side what the connector has to say; None for nothing."""
        if not self.connection.has_push_work:
            return None
        self._step_id += 1
        return self.connection.with_meta(StepPlan(self._step_id, ()))

    @property
    def holds_nothing(self) -> bool:
        """Whether no request has, or is about to have, blocks."""
        return not self.running and not self.connection.loads.loading and not self.connection.keeps_tables

    def requeue_all(self) -> None:
        """Send every request back to the queue, from where it starts over."""
        for request in list(self.running):
            self._preempt(request)
        loading = list(self.connection.loads.loading)
        for request in loading:
            self._requeue(request)

    def fail(self, plan: StepPlan, error: Exception | None, now: float) -> list[RequestUpdate]:
        """The step raised: nothing of it counts. Its requests are retried one by one; one that raises again ends.

        `error` None (an interrupt) sends the requests back to the queue without suspicion.
        """
        touched = {part.request_id for part in plan.requests}
        touched |= {request_id for request_id, _ in self.manager.copies_in_flight}
        reached = {part.request_id: part.end for part in plan.requests}
        self.manager.end_copies()
        self.checks.fail(touched)
        updates: list[RequestUpdate] = []
        for request in [request for request in self.running if request.request_id in touched]:
            guilty = error is not None and request.request_id in self._suspects
            self._release(request)
            if guilty:
                request.error = f"{type(error).__name__}: {error}"
                updates += self._end_without_blocks(request, FinishReason.ERROR, now)
            else:
                self._requeue(request)
                if error is not None:
                    self._suspects[request.request_id] = reached.get(request.request_id, 0)
        self.counters["num_failed_steps"] += 1
        return updates

    def finish(
        self, request_id: str, reason: FinishReason, now: float, stop_reason: int | str | None = None
    ) -> list[RequestUpdate]:
        """End a request between two steps; unknown ids are ignored.

        A sample that still waits for the prefill of its prompt ends alone; with the sample that carries it all end.
        """
        for request in self.running:
            if request.request_id == request_id:
                request.stop_reason = stop_reason
                self._let_go(request)
                return self._end(request, reason, now)
        for request in (*self.waiting, *self.connection.loads.loading):
            if request.request_id == request_id:
                request.stop_reason = stop_reason
                return self._end_without_blocks(request, reason, now)
        for request in self.requests():
            for sibling in request.siblings:
                if sibling.request_id == request_id:
                    request.siblings.remove(sibling)
                    return self._end_without_blocks(sibling, reason, now)
        return []

    # Planning.

    def _schedule_running(self, scheduled: dict[Request, int], budget: int, solo: str | None) -> tuple[int, bool]:
        """Give running requests what their next tokens need; returns the budget left and whether one was preempted."""
        preempted = False
        for request in list(self.running):
            if budget == 0:
                break
            if request.status is not RequestStatus.RUNNING or (solo is not None and request.request_id != solo):
                continue
            num_tokens = self._chunk(request, request.num_computed_tokens, budget)
            while self.manager.allocate_slots(request, num_tokens) is None:
                if self.checks.give_way():
                    continue
                # The last in order goes first, so no victim has been scheduled in this step yet.
                victim = self.running[-1] if solo is None else self._solo_victim(request)
                preempted = True
                self._preempt(victim)
                if victim is request:
                    # Alone and out of room: it held more slabs than it needs. It starts over, packed, and cannot fail.
                    request.packed = not self.running
                    break
            else:
                scheduled[request] = num_tokens
                budget -= num_tokens
        return budget, preempted

    def _solo_victim(self, request: Request) -> Request:
        return next((other for other in reversed(self.running) if other is not request), request)

    def _admit_waiting(self, scheduled: dict[Request, int], budget: int, solo: str | None) -> None:
        planned = PlannedBoundaries(self._unit)
        for request in self.running:
            planned.add(request, self.manager.planned_boundaries(request))
        for request, load in self.connection.loads.loading.items():
            planned.add(request, [load.boundary])
        for request in list(self.waiting):
            if budget == 0 or (solo is None and self._is_full()):
                break
            if solo is not None and request.request_id != solo:
                continue
            if solo is None and self._still_waits(request, planned):
                continue
            found = self._look_up(request, planned, solo)
            if found is None:
                continue
            computed, report = found
            if request.packed:
                computed = self.manager.truncate_computed_blocks(computed, 0)
            num_tokens = self._admit(request, computed, report, budget, solo)
            if num_tokens is None:
                break
            planned.add(request, self.manager.planned_boundaries(request))
            scheduled[request] = num_tokens
            budget -= num_tokens

    def _look_up(
        self, request: Request, planned: PlannedBoundaries, solo: str | None
    ) -> tuple[ComputedBlocks, HitReport] | None:
        """The hit to admit a request with; None if it waits for a better one or loads it."""
        computed, boundary, report = self.manager.get_computed_blocks(request)
        if solo is not None:
            return computed, report
        if self._starts_to_wait(request, boundary, planned):
            return None
        decision = self.connection.loads.consider(request, computed)
        if decision is Decision.LOAD:
            self.waiting.remove(request)
            request.status = RequestStatus.LOADING
            planned.add(request, [self.connection.loads.loading[request].boundary])
        if decision is Decision.LOOK_AGAIN:
            computed, _, report = self.manager.get_computed_blocks(request)
        return None if decision in (Decision.WAIT, Decision.LOAD) else (computed, report)

    def _is_full(self) -> bool:
        """Whether nothing may be admitted beside what runs."""
        return len(self.running) >= self.config.max_num_seqs or any(request.packed for request in self.running)

    def _starts_to_wait(self, request: Request, hit: int, planned: PlannedBoundaries) -> bool:
        if request.awaits_prompt_logprobs:
            return False
        request.awaited_boundary = planned.longest(hit, request.block_hashes, request.num_tokens)
        return self._still_waits(request, planned)

    def _still_waits(self, request: Request, planned: PlannedBoundaries) -> bool:
        """Whether a running request is still going to commit the boundary this one waits for; needs no lookup."""
        boundary = request.awaited_boundary
        if not boundary or request.num_wait_steps >= self.config.prefix_wait_steps:
            return False
        if not planned.has(boundary, request.block_hashes[boundary // self._unit - 1]):
            request.awaited_boundary = 0
            return False
        request.num_wait_steps += 1
        self.counters["num_prefix_wait_steps"] += 1
        return True

    def _admit(
        self, request: Request, computed: ComputedBlocks, report: HitReport, budget: int, solo: str | None
    ) -> int | None:
        """Admit a request and return its first chunk, or None when there is no room.

        While others run, room for the known tokens must be left. A request that would run alone must have room for all
        it can ever need, with a shorter hit if the full one is in the way: then it cannot fail later.
        """
        # From here on the hit pins what it needs itself.
        self.connection.loads.release(request)
        if request.packed:
            self.checks.give_way()
        while True:
            alone = not self.running
            num_tokens = self._chunk(request, computed.boundary, budget)
            room = self._most_tokens(request) if alone else request.num_tokens
            beside = not request.packed and len(self.running) < self.config.max_num_seqs
            if (alone or beside) and self.manager.allocate_slots(
                request, num_tokens, computed, room_for_tokens=room, packed=request.packed
            ):
                break
            if (alone or beside) and self.checks.give_way():
                continue
            if alone and computed.boundary:
                computed = self.manager.truncate_computed_blocks(computed, computed.boundary - self._unit)
            elif solo is not None and self.running:
                self._preempt(self.running[-1])
            else:
                return None
        self._note_admission(request, computed.boundary, report)
        self.checks.choose(request, computed.boundary)
        self.waiting.remove(request)
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=_order)
        return num_tokens

    def _note_admission(self, request: Request, boundary: int, report: HitReport) -> None:
        if request.num_cached_tokens is not None:
            self.counters["num_recovered_tokens"] += boundary
            return
        report.shorten(boundary, LostReason.NO_ROOM)
        self.connection.loads.explain(request, boundary, report)
        request.hit_report = report
        request.num_cached_tokens = boundary
        self.counters["prompt_tokens"] += request.num_prompt_tokens
        if self.manager.config.enable_prefix_caching:
            self.counters["prefix_cache_queries"] += request.num_prompt_tokens
            self.counters["prefix_cache_hits"] += boundary
        for reason, tokens in report.lost.items():
            self.counters[f"prefix_cache_lost_tokens_{reason}"] += tokens

    def _chunk(self, request: Request, start: int, budget: int) -> int:
        """Tokens of the next step; a chunk that is not the last ends at a multiple of H when the budget allows."""
        left = request.num_tokens - start
        if left <= budget:
            return left
        aligned = (start + budget) // self._unit * self._unit - start
        return aligned if aligned > 0 else budget

    def _most_tokens(self, request: Request) -> int:
        return min(request.max_total_tokens, self.config.max_model_len)

    def _planned(self, request: Request, num_tokens: int) -> ScheduledRequest:
        start = request.num_computed_tokens
        end = start + num_tokens
        return ScheduledRequest(
            request_id=request.request_id,
            token_ids=request.token_ids[start:end],
            start=start,
            block_tables=self.manager.block_tables(request),
            state=self.manager.state_step(request),
            sample=sample_spec(request) if end == request.num_tokens else None,
            prompt_rows=prompt_rows(request, start, end),
        )

    def _next_suspect(self) -> str | None:
        if not self._suspects:
            return None
        by_order = sorted([*self.running, *self.waiting], key=_order)
        return next(request.request_id for request in by_order if request.request_id in self._suspects)

    # Ending and going back.

    def _append(self, request: Request, result: StepResult, now: float) -> list[RequestUpdate]:
        """Append sampled tokens, one per sample; the first time, start the other samples of the prompt."""
        siblings, request.siblings = request.siblings, []
        updates = []
        tokens = result.sampled[request.request_id]
        rows = result.logprobs.get(request.request_id)
        for index, sample in [*enumerate(siblings, 1), (0, request)]:
            token = tokens[index]
            sample.token_ids.append(token)
            sample.witness_until = max(sample.witness_until, request.witness_until)
            if rows is not None:
                take_row(sample, rows[index])
            self.counters["generation_tokens"] += 1
            if sample.first_token_time is None:
                sample.first_token_time = now
            reason, sample.stop_reason = finish_of(sample, token, self.config.max_model_len)
            if sample is not request:
                sample.num_cached_tokens = request.num_cached_tokens
                sample.hit_report = request.hit_report
            if reason is None:
                if sample is not request:
                    self._start_sibling(request, sample)
                updates.append(RequestUpdate(sample, [token], finished=False))
                continue
            if sample is request:
                self._let_go(request)
            self._end(sample, reason, now)
            updates.append(RequestUpdate(sample, [token], finished=True))
        return updates

    def _start_sibling(self, request: Request, sibling: Request) -> None:
        sibling.root_hash, sibling.block_hashes = request.root_hash, list(request.block_hashes)
        sibling.prefill_target = request.prefill_target
        if not self._is_full() and self.manager.fork(request, sibling):
            sibling.status = RequestStatus.RUNNING
            insort(self.running, sibling, key=_order)
        else:
            insort(self.waiting, sibling, key=_order)

    def _let_go(self, request: Request) -> None:
        """Publish what a running request leaves behind and take its blocks."""
        self.manager.publish_last_state(request, finished=True)
        if self.connection.let_go(request):
            self.running.remove(request)
        else:
            self._release(request)

    def _release(self, request: Request) -> None:
        self.manager.free(request)
        self.running.remove(request)

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks; it resumes from what it published."""
        self.manager.publish_last_state(request, finished=False)
        self._release(request)
        self._requeue(request)
        request.num_preemptions += 1
        self.counters["num_preemptions"] += 1

    def _requeue(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_wait_steps = request.awaited_boundary = 0
        self.connection.loads.forget(request)
        insort(self.waiting, request, key=_order)

    def _end(self, request: Request, reason: FinishReason, now: float) -> list[RequestUpdate]:
        """Mark a request that holds nothing as finished; samples that wait for its prefill end with it."""
        updates = []
        self.connection.loads.forget(request)
        for sample in (request, *request.siblings):
            if sample is not request:
                self.connection.ended(sample)
            sample.status = RequestStatus.FINISHED
            sample.finish_reason = reason
            sample.error = request.error
            sample.finish_time = now
            self._suspects.pop(sample.request_id, None)
            self._unfinished.discard(sample.request_id)
            self.counters[f"request_success_{reason.value}"] += 1
            self.checks.enqueue(sample)
            updates.append(RequestUpdate(sample, [], finished=True))
        request.siblings = []
        return updates

    def requests(self) -> Iterable[Request]:
        """All unfinished requests, running ones first."""
        return (*self.running, *self.waiting, *self.connection.loads.loading)

    def _return_loading(self, back: list[Request], ended: list[Request], now: float) -> list[RequestUpdate]:
        for request in back:
            request.status = RequestStatus.WAITING
            insort(self.waiting, request, key=_order)
        return [update for request in ended for update in self._end_without_blocks(request, FinishReason.ERROR, now)]

    def _end_without_blocks(self, request: Request, reason: FinishReason, now: float) -> list[RequestUpdate]:
        """End a request that does not run."""
        if request in self.waiting:
            self.waiting.remove(request)
        self.connection.ended(request)
        return self._end(request, reason, now)
