"""The engine core: poll, schedule, execute, commit, emit. One step is in flight; no torch here."""

import logging
from collections.abc import Callable
from contextlib import ExitStack

from dalsegno.config import CacheConfig, SchedulerConfig
from dalsegno.connector.base import SchedulerConnector
from dalsegno.engine.held_answers import HeldAnswers
from dalsegno.errors import EngineError, OptionError, RequestError
from dalsegno.kv.eviction import EvictionPolicy, LeastRecentlyUsed
from dalsegno.kv.index import PrefixIndex
from dalsegno.kv.layout import MemoryLayout
from dalsegno.kv.manager import KVCacheManager
from dalsegno.kv.verify import census
from dalsegno.request import FinishReason, Request, RequestUpdate
from dalsegno.sched.cold_checks import ColdCheckSetup
from dalsegno.sched.connection import Connection, ConnectorSetup
from dalsegno.sched.scheduler import Scheduler
from dalsegno.types import Clock, StepPlan
from dalsegno.worker.interface import Worker

__all__ = ["EngineCore", "RequestUpdate"]

logger = logging.getLogger(__name__)

# A wait ends when the connector reports; this bounds it for connectors that forget to say so.
_LONGEST_WAIT_S = 1.0


class EngineCore:
    """Requests in, tokens out. All methods are called on one thread, the engine thread."""

    def __init__(  # noqa: PLR0913 - everything an engine is made of meets here
        self,
        worker: Worker,
        clock: Clock,
        layout: MemoryLayout,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        *,
        debug: bool = False,
        eviction_policy: Callable[[PrefixIndex], EvictionPolicy] = LeastRecentlyUsed,
        connector: ConnectorSetup | None = None,
        cold_checks: ColdCheckSetup | None = None,
    ) -> None:
        """Serve requests on `worker`, which the core owns from now on.

        Args:
            worker: executes the step plans; closed by `close`.
            clock: stamps requests.
            layout: how the worker's memory is cut.
            cache_config: see `CacheConfig`.
            scheduler_config: see `SchedulerConfig`.
            debug: poison freed blocks with NaN, and check every count after every step.
            eviction_policy: makes the policy that ranks cached blocks.
            connector: the connector whose worker side the worker has.
            cold_checks: which hits are computed again; None for none.

        Raises:
            OptionError: a request of `max_model_len` tokens does not fit the memory.
        """
        self.worker = worker
        self.clock = clock
        self.layout = layout
        self.manager = KVCacheManager(
            layout,
            cache_config,
            max_step_tokens=scheduler_config.max_num_batched_tokens,
            policy=eviction_policy,
        )
        self._setup = connector or ConnectorSetup()
        self.connection = Connection(self.manager, self._setup, clock)
        self.connection.connector.on_progress(worker.port.wake)
        self.scheduler = Scheduler(self.manager, scheduler_config, self.connection, cold_checks)
        self._held_answers = HeldAnswers(self.connection.connector, clock, self._setup.job_timeout_s)
        self._debug = debug
        self._aborts: list[str] = []
        self._stops: list[tuple[str, str]] = []
        # What happened and was not returned yet; an interrupt that leaves `step` takes nothing of it along.
        self._updates: list[RequestUpdate] = []
        self._num_idle_steps = 0
        # Set while the counts of a step are open: what leaves `step` then leaves counts that nobody owns.
        self._broken = False
        if debug:
            self.manager.pool.on_fill = worker.poison
        self._check_room(scheduler_config.max_model_len)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` still has something to do."""
        return self.scheduler.has_unfinished or bool(self._updates) or len(self._held_answers) > 0

    @property
    def has_background_work(self) -> bool:
        """Whether `step` still has something to do for the connector, though perhaps for no request."""
        return self.connection.has_push_work or self.connection.connector.has_pending_jobs()

    @property
    def has_pending_checks(self) -> bool:
        """Whether `step` still has hits to compute again, which nobody waits for."""
        return self.scheduler.checks.is_pending

    @property
    def broken(self) -> bool:
        """Whether a step was left in the middle; nothing is served any more then."""
        return self._broken

    def add_request(self, request: Request) -> None:
        """Queue a request; its siblings come with it.

        Raises:
            RequestError: it can never be served, whatever else runs; or an unfinished request has its id.
            EngineError: the engine is broken.
        """
        self._check_sound()
        longest = self.scheduler.config.max_model_len
        if not request.num_tokens:
            raise RequestError(f"request {request.request_id}: the prompt is empty; at least one token is needed")
        if request.num_tokens >= longest:
            raise RequestError(
                f"request {request.request_id}: the prompt has {request.num_tokens} tokens; at most {longest - 1} are "
                f"allowed with max_model_len={longest}"
            )
        # Ids are used again: what was said of an earlier request of this name is not meant for this one.
        ids = {sample.request_id for sample in (request, *request.siblings)}
        taken = sorted(request_id for request_id in ids if self.scheduler.knows(request_id))
        if taken or len(ids) <= len(request.siblings):
            raise RequestError(
                f"request {request.request_id}: ids of unfinished requests are unique, {taken or ids} are not"
            )
        self._aborts = [request_id for request_id in self._aborts if request_id not in ids]
        self._stops = [stop for stop in self._stops if stop[0] not in ids]
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request at the next poll; unknown ids are ignored."""
        self._aborts.append(request_id)

    def stop(self, request_id: str, stop_reason: str) -> None:
        """Finish a request at the next poll because its text holds a stop string."""
        self._stops.append((request_id, stop_reason))

    def step(self) -> list[RequestUpdate]:
        """Run one step and return what it did, in no particular order.

        Raises:
            EngineError: a broken invariant, or a step that was left in the middle before; the engine is of no more use.
        """
        self._check_sound()
        self._broken = True
        self._poll()
        blocked = self.connection.loads.blocks_engine
        plan = self.scheduler.push_plan() if blocked else self.scheduler.schedule()
        if plan is not None:
            self._num_idle_steps = 0
            self._execute(plan)
        elif not self._wait():
            self._check_stall()
        if not self.scheduler.has_unfinished and self.connection.has_push_work:
            # Nobody may take another step, and what the last one left must not wait for somebody who does.
            plan = self.scheduler.schedule()
            assert plan is not None, "the connector has something to say and is not heard"
            self._execute(plan)
        self._updates = [*self._held_answers.add(self._updates), *self._held_answers.release()]
        if self._debug:
            self.verify()
        self._broken = False
        updates, self._updates = self._updates, []
        return updates

    def reset_prefix_cache(self, *, reset_running_requests: bool = False, reset_external: bool = False) -> bool:
        """Forget all cached prefixes.

        Args:
            reset_running_requests: send running requests back to the queue instead of refusing; they start over.
            reset_external: empty this engine's part of the store too; what is under way there enters it no more.

        Returns:
            False, and nothing has changed, while requests run or load.
        """
        self.scheduler.checks.give_way()
        if reset_running_requests:
            self.scheduler.requeue_all()
        if not self.scheduler.holds_nothing or not self.manager.reset_prefix_cache():
            return False
        if reset_external:
            done = self.connection.connector.reset_cache()
            plan = self.scheduler.push_plan()
            if plan is not None:
                self._execute(plan)
            return done
        return True

    def wait_for_connector(self, timeout_s: float) -> bool:
        """Take reports until the connector owes none; False if it still does after `timeout_s` seconds.

        Requests are not advanced.
        """
        deadline = self.clock.now() + timeout_s
        while self.serve_connector(deadline - self.clock.now()):
            if self.clock.now() >= deadline:
                return False
        return True

    def serve_connector(self, timeout_s: float) -> bool:
        """Push what it has to say and take what it reports; wait once, up to `timeout_s`, if it owes more.

        Returns:
            Whether it still owes a report.
        """
        plan = self.scheduler.push_plan()
        if plan is not None:
            self._execute(plan)
        self._take_output()
        owes = self.connection.connector.has_pending_jobs()
        if owes and timeout_s > 0:
            self.worker.port.wait(min(timeout_s, _LONGEST_WAIT_S))
            self._take_output()
        return self.has_background_work

    def stats(self) -> dict[str, int | float]:
        """Counters since the start, and what is in use at this moment."""
        return {
            **self.scheduler.counters,
            **self.scheduler.checks.counters,
            **self.manager.counters,
            **self.connection.loads.counters,
            **self.connection.connector.stats(),
            **self.worker.port.stats(),
            **self.manager.pool.counts(),
            "num_evicted_blocks": self.manager.pool.num_evicted,
            "num_cached_blocks": len(self.manager.index),
            "num_requests_running": len(self.scheduler.running),
            "num_requests_waiting": len(self.scheduler.waiting),
            "kv_cache_usage_perc": self.manager.usage(),
        }

    def verify(self) -> None:
        """Recompute every count from first principles, and when idle check that nothing is held.

        Raises:
            AssertionError: naming the first difference.
        """
        checks = self.scheduler.checks
        holds = self.scheduler.has_unfinished or checks.holds_blocks or self.connection.keeps_tables
        if holds or self.has_background_work:
            self.manager.verify()
        else:
            census(self.manager)

    def close(self) -> None:
        """Drop all requests and close the worker, also if the wait for the connector is interrupted."""
        with ExitStack() as stack:
            stack.callback(self.connection.connector.shutdown)
            stack.callback(self.worker.close)
            if self._broken:
                return
            self.scheduler.checks.drop_all()
            for request in list(self.scheduler.requests()):
                self.scheduler.finish(request.request_id, FinishReason.ABORT, self.clock.now())
            if not self.wait_for_connector(self._setup.close_timeout_s):
                logger.warning("closed with work of the connector left undone: %s", self.connection.connector.stats())
            self.connection.free_kept()

    def _check_sound(self) -> None:
        if self._broken:
            raise EngineError("an earlier step was left in the middle, so its counts are open: make a new engine")

    def _check_room(self, max_model_len: int) -> None:
        """Refuse to start where the longest request does not fit alone."""
        layout = self.layout
        needed = self.manager.slabs_alone(max_model_len)
        self.manager.pins.max_slabs = spare = layout.num_slabs - 1 - needed
        if spare < 1 and type(self.connection.connector) is not SchedulerConnector:
            logger.warning(
                "a request of max_model_len=%d tokens takes the whole memory, so nothing can be held for the store: "
                "nothing will be stored or loaded; lower max_model_len or set kv_cache_memory_bytes to more than %d",
                max_model_len,
                (needed + 1) * layout.slab_bytes,
            )
        if needed > layout.num_slabs - 1:
            raise OptionError(
                f"max_model_len={max_model_len} needs {needed + 1} slabs of {layout.slab_bytes} bytes "
                f"with the null slab, the memory holds {layout.num_slabs}: lower max_model_len or set "
                f"kv_cache_memory_bytes to at least {(needed + 1) * layout.slab_bytes}"
            )

    def _poll(self) -> None:
        self._take_output()
        stops, self._stops = self._stops, []
        aborts, self._aborts = self._aborts, []
        for request_id, stop_reason in stops:
            self._updates += self.scheduler.finish(request_id, FinishReason.STOP, self.clock.now(), stop_reason)
        for request_id in aborts:
            self._updates += self.scheduler.finish(request_id, FinishReason.ABORT, self.clock.now())

    def _take_output(self) -> None:
        now = self.clock.now()
        for output in self.worker.port.outputs():
            self._updates += self.scheduler.update_connector(output, now)
        self._updates += self.scheduler.expire_loads(now)

    def _wait(self) -> bool:
        """Wait for the connector if only it can make something happen; whether it is so."""
        if not self.connection.loads.is_waited_for and not len(self._held_answers):
            return False
        if self._held_answers.is_due() or self.connection.has_push_work:
            return True
        deadlines = [self.connection.loads.deadline(), self._held_answers.deadline()]
        left = min((at - self.clock.now() for at in deadlines if at is not None), default=_LONGEST_WAIT_S)
        self.worker.port.wait(max(0.0, min(left, _LONGEST_WAIT_S)))
        return True

    def _execute(self, plan: StepPlan) -> None:
        try:
            result = self.worker.execute(plan)
        except Exception as error:
            logger.exception("step %d of %d requests raised", plan.step_id, len(plan.requests))
            self._updates += self.scheduler.fail(plan, error, self.clock.now())
        except BaseException:
            self._updates += self.scheduler.fail(plan, None, self.clock.now())
            self._broken = False
            raise
        else:
            self._updates += self.scheduler.commit(plan, result, self.clock.now())

    def _check_stall(self) -> None:
        """A step may find nothing to run right after a preemption, never twice in a row."""
        self._num_idle_steps += 1
        if self.scheduler.has_unfinished and self._num_idle_steps > 2:
            waiting = [request.request_id for request in self.scheduler.waiting]
            raise EngineError(f"nothing can run although requests {waiting[:8]} wait: {self.stats()}")
        if not self.scheduler.has_unfinished:
            self._num_idle_steps = 0
