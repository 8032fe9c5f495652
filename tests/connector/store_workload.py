"""Random runs of one or two engines on one audited store, drawn from a seed, and what must hold whatever happens."""

import logging
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from dalsegno.config import CacheConfig, SchedulerConfig
from dalsegno.connector.config import KVTransferConfig
from dalsegno.connector.registry import ConnectorContext, Sides, create_connector
from dalsegno.connector.store.connector import StoreScheduler
from dalsegno.connector.store.keys import KeyMaker
from dalsegno.connector.store.messages import StoredObject
from dalsegno.engine.core import EngineCore
from dalsegno.kv.layout import MemoryLayout
from dalsegno.request import FinishReason, Request, RequestUpdate
from dalsegno.sampling_params import SamplingParams
from dalsegno.sched.connection import ConnectorSetup
from dalsegno.store.base import Store
from dalsegno.store.keys import salt_tag
from dalsegno.store.memory import MemoryStore
from dalsegno.store.mooncake import MooncakeStore
from dalsegno.store.wrappers.faulty import Fault, FaultyStore
from dalsegno.store.wrappers.latency import LatencyStore
from dalsegno.testing.auditing_store import AuditingStore, CellAuditor
from dalsegno.testing.builders import layout_alone, make_cut, make_request
from dalsegno.testing.fake_memory import rank_mask
from dalsegno.testing.fake_mooncake import FakeMooncakeMaster
from dalsegno.testing.fake_worker import FakeClock, FakeWorker, expected_tokens
from dalsegno.testing.faulty_mooncake import UnluckyMooncakeClient
from dalsegno.types import BlockHash, StepPlan
from tests.connector.engines import Unclosable
from tests.connector.unruly import UnrulyWorker

VOCABULARY = 97
_STALL_STEPS = 400


@contextmanager
def quiet_log() -> Iterator[None]:
    """Planted failures are logged with a traceback each; a thousand of them help nobody."""
    logger = logging.getLogger("dalsegno")
    before, logger.disabled = logger.disabled, True
    children = [logging.getLogger(name) for name in list(logging.Logger.manager.loggerDict) if "dalsegno" in name]
    disabled = [child.disabled for child in children]
    for child in children:
        child.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
        for child, was in zip(children, disabled, strict=True):
            child.disabled = was


@cache
def _base(number: int) -> tuple[int, ...]:
    return tuple(random.Random(number).choices(range(VOCABULARY), k=400))


class Shape:
    """What the engines of one run have in common, drawn from a seed."""

    def __init__(self, rng: random.Random) -> None:
        self.kinds = rng.choice(["as", "as", "aws", "a", "ws", "s", "aw"])
        self.unit = rng.choice([4, 16])
        units = rng.choice([1, 2, 4])
        self.window = rng.choice([3, 16, 40])
        self.max_model_len = rng.choice([60, 150])
        self.config = CacheConfig(
            block_size=self.unit * units,
            hash_block_size=self.unit,
            decode_checkpoint_interval=self.unit * rng.choice([0, 1, 1, 2]),
            max_states_per_request=rng.choice([2, 16]),
        )
        self.object_tokens = self.config.block_size * rng.choice([1, 2, 4])
        self.cut = [rng.choice([1, 1, 2, 4, 8]) for _ in self.kinds]
        self.world_size = rng.choice([1, 1, 1, 2, 4])
        self.put_step = {group: rng.choice([1, 2, self.world_size]) for group in range(2) if self.world_size > 1}

    def layout(self, budget: int, extra: str) -> MemoryLayout:
        """Exactly the need of the largest request, one slab more, or several times as much."""
        cut = make_cut(
            self.kinds, self.cut, block_size=self.config.block_size, hash_block_size=self.unit, window=self.window
        )
        need = layout_alone(cut, self.config, max_model_len=self.max_model_len, budget=budget)
        return cut.with_slabs({"none": need, "one": need + 1, "twice": 2 * need, "many": 8 * need}[extra])

    def context(self, layout: MemoryLayout, clock: FakeClock) -> ConnectorContext:
        ranks = range(self.world_size)
        return ConnectorContext(layout, self.config, {"weights": "w"}, clock, ranks, len(ranks), self.put_step)

    def masks(self) -> dict[tuple[str, int], int]:
        """Of cells, by the namespace they are stored under and their group."""
        context = self.context(self.layout(64, "one"), FakeClock())
        found = {}
        for rank in range(self.world_size):
            maker = KeyMaker(context, rank, self.object_tokens, "")
            for group in context.layout.groups:
                step = self.put_step.get(group.group_id, 1)
                named = StoredObject(group.group_id, 0, self.unit, BlockHash(bytes(32)))
                found[maker.key(salt_tag(None), named).namespace, group.group_id] = rank_mask(
                    rank, group.group_id, step
                )
        return found


class Engine:
    """One engine of a run, with its own settings."""

    def __init__(self, shape: Shape, rng: random.Random, store: Store) -> None:
        self.shape, self.rng = shape, rng
        budget = rng.choice([5, 16, 24, 64, 256])
        self.layout = shape.layout(budget, rng.choice(["none", "one", "twice", "many", "many"]))
        self.clock = FakeClock()
        settings = self.settings(store)
        role = rng.choice(["kv_both", "kv_both", "kv_both", "kv_producer", "kv_consumer"])
        self.stores: list[StoreScheduler] = []
        self.ranks: list[UnrulyWorker] = []
        scheduler, workers = self.connect(role, settings)
        self.worker = FakeWorker(
            self.layout, self.clock, vocab_size=VOCABULARY, connectors=workers, put_step=shape.put_step
        )
        self.worker.before_step = self.before_step
        setup = ConnectorSetup(
            scheduler, len(workers), load_timeout_s=rng.choice([2.0, 30.0, 1000.0]), job_timeout_s=30.0
        )
        scheduling = SchedulerConfig(
            shape.max_model_len,
            budget,
            max_num_seqs=rng.choice([1, 3, 64]),
            policy=rng.choice(["fcfs", "priority"]),
            prefix_wait_steps=rng.choice([0, 3, 64]),
        )
        self.core = EngineCore(
            self.worker, self.clock, self.layout, shape.config, scheduling, debug=True, connector=setup
        )
        self.fails_next = False
        self.num_idle = 0
        self.num_steps = 0

    def settings(self, store: Store) -> dict[str, Any]:
        """Of a connector on `store`."""
        rng = self.rng
        return {
            "store": Unclosable(store),
            "store_block_size": self.shape.object_tokens,
            "save_decode_cache": rng.choice([True, True, False, None]),
            "load_async": rng.choice([True, True, False]),
            "lookup_async": rng.choice([False, False, True]),
            "lookup_timeout_s": rng.choice([2.0, 1000.0]),
            "max_store_backlog_bytes": rng.choice([2**30, 2**30, 4096, 1]),
            "max_state_probes": rng.choice([1, 4, 256]),
            "pressure_pause_s": rng.choice([0.01, 5.0]),
        }

    def connect(self, role: str, settings: dict[str, Any]) -> Sides:
        """Make the engine's connector."""
        return self.store_sides(KVTransferConfig("StoreConnector", role, settings))

    def store_sides(self, config: KVTransferConfig) -> Sides:
        """Make a store connector whose reports may be unruly."""
        scheduler, workers = create_connector(config, self.shape.context(self.layout, self.clock))
        assert isinstance(scheduler, StoreScheduler)
        self.stores.append(scheduler)
        unruly = self.rng.random() < 0.5
        ranks = [UnrulyWorker(worker, self.rng, hold=0.5 * unruly, repeat=0.2 * unruly) for worker in workers]
        self.ranks += ranks
        return scheduler, ranks

    def before_step(self, plan: StepPlan) -> None:
        if self.fails_next and plan.requests:
            self.fails_next = False
            raise ValueError("planted")

    def step(self) -> list[RequestUpdate]:
        self.num_steps += 1
        updates = self.core.step()
        moved = any(update.new_token_ids or update.finished for update in updates)
        self.num_idle = 0 if moved else self.num_idle + 1
        assert self.num_idle < _STALL_STEPS, f"no token for {self.num_idle} steps: {self.core.stats()}"
        self.check_pins()
        return updates

    def check_pins(self) -> None:
        """40, R5, R6: pins are those of jobs and loads, one per block of a job, and leave room for the largest."""
        manager = self.core.manager
        ledgers = [store._jobs._ledger for store in self.stores]
        owned = [list(job.pins) for ledger in ledgers for job in ledger._jobs.values()]
        assert all(len(set(pins)) == len(pins) for pins in owned), "a job holds two references on a block"
        loads = {*manager.loads.active.values(), *self.core.connection.loads._landed.values()}
        owners = Counter(pin for pins in [*owned, *(load.pins for load in loads)] for pin in pins if pin[1])
        assert owners == +manager.pins.counts
        assert manager.pins.max_slabs is not None
        assert manager.pins.num_slabs <= manager.pins.max_slabs
        for store in self.stores:
            assert store._jobs.backlog_bytes <= store._settings.max_store_backlog_bytes

    def settle(self) -> None:
        """Report everything, then take the census of engine and connector."""
        for rank in self.ranks:
            rank.hold = 0.0
        assert self.core.wait_for_connector(10_000), self.core.stats()
        self.core.verify()
        loads = self.core.connection.loads
        left = [loads.loading, loads._landed, loads._asked, loads._pending, loads._overdue, loads._manager.loads.active]
        for store in self.stores:
            jobs, lookups = store._jobs, store._lookups
            left += [store._loads, store._matches, lookups._excluded, lookups._answers]
            left += [jobs._ledger._jobs, jobs._ledger._pending, jobs._ledger._asked, jobs.outbox]
            left.append(store._loads_outbox)
            if lookups._thread is not None:
                left.append(lookups._thread._asked)
            assert jobs.backlog_bytes == 0
        assert not any(left), f"something is remembered: {left}"
        assert not self.core.manager.pins.counts


class StoreRun:
    """Plays `num_steps` steps of a seed."""

    engine_class = Engine

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.shape = shape = Shape(rng)
        self.made = self.make_store(rng)
        inner: Store = self.made
        faults = rng.random() < 0.4
        if rng.random() < 0.5:
            inner = LatencyStore(inner, rng.choice([0.0002, 0.001, 0.003]))
        self.audit = AuditingStore(
            inner, shape.layout(64, "one"), shape.unit, shape.object_tokens, CellAuditor(shape.masks())
        )
        store: Store = self.audit
        if faults:
            store = FaultyStore(self.audit, rates=dict.fromkeys(Fault, rng.choice([0.02, 0.2])), seed=seed)
        with quiet_log():
            self.engines = [self.engine_class(shape, rng, store) for _ in range(rng.choice([1, 1, 2]))]
        self.requests: list[tuple[Engine, Request, list[int]]] = []
        self.answers: list[list[int]] = []
        self.count = 0

    def make_store(self, rng: random.Random) -> MemoryStore | MooncakeStore:
        """Memory, or the fake Mooncake; with little room or much, with bad luck or without."""
        if rng.random() < 0.5:
            return MemoryStore(rng.choice([None, None, 20_000, 3_000]))
        self.master = FakeMooncakeMaster()
        segment_bytes = rng.choice([2**24, 20_000])
        client = UnluckyMooncakeClient(self.master, segment_bytes, rng.choice([0.0, 0.1]), rng.randrange(100))
        return MooncakeStore(client, probe_interval_s=0.001)

    def play(self, num_steps: int) -> int:
        """Run; returns the steps made."""
        with quiet_log():
            while sum(engine.num_steps for engine in self.engines) < num_steps:
                self.act(self.rng.choice(self.engines))
                self.check_finished()
            for engine in self.engines:
                while engine.core.has_unfinished_requests:
                    engine.step()
                engine.core.step()
                engine.settle()
            self.check_finished()
            assert not self.requests
            self.audit.check()
            for engine in self.engines:
                assert engine.core.reset_prefix_cache(reset_external=True)
                engine.settle()
                assert engine.core.stats()["num_empty_slabs"] == engine.layout.num_slabs - 1
                engine.core.close()
        return sum(engine.num_steps for engine in self.engines)

    def act(self, engine: Engine) -> None:
        rng, core = self.rng, engine.core
        mine = [request for other, request, _ in self.requests if other is engine]
        what = rng.random()
        if what < 0.25 and len(mine) < 8:
            self.arrive(engine)
        elif what < 0.29 and mine:
            core.abort(rng.choice(mine).request_id)
        elif what < 0.31 and mine:
            core.stop(rng.choice(mine).request_id, "a stop string")
        elif what < 0.35 and core.scheduler.running:
            core.scheduler._preempt(rng.choice(core.scheduler.running))
        elif what < 0.37:
            core.reset_prefix_cache(reset_running_requests=rng.random() < 0.7)
        elif what < 0.38:
            core.reset_prefix_cache(reset_running_requests=rng.random() < 0.7, reset_external=True)
        elif what < 0.385:
            engine.fails_next = True
        elif what < 0.39:
            self.lose()
        else:
            for _ in range(rng.choice([1, 1, 3, 10])):
                if core.has_unfinished_requests:
                    engine.step()

    def lose(self) -> None:
        """The store loses some of its objects, or all, and tells nobody."""
        share = self.rng.choice([0.2, 0.2, 1.0])
        if isinstance(self.made, MemoryStore):
            with self.made._lock:
                keys = list(self.made._entries)
            self.made.remove([key for key in keys if self.rng.random() < share])
            return
        with self.master.lock:
            names = [name for name, item in self.master.objects.items() if item.is_complete]
            for name in names:
                if self.rng.random() < share:
                    self.master.evict(name)

    def arrive(self, engine: Engine) -> None:
        rng, longest = self.rng, self.shape.max_model_len
        self.count += 1
        source = rng.choice([_base(0), _base(1), *self.answers[-6:]])
        prompt = [*source[: rng.randrange(1, longest)], *[rng.randrange(VOCABULARY)] * rng.choice([0, 0, 1, 9])]
        prompt = prompt[: longest - 1]
        max_tokens = min(rng.choice([1, 1, 3, 20, 45]), longest - len(prompt))
        samples = rng.choice([1, 1, 1, 1, 3])
        salt = rng.choice([None, None, None, "x"])
        colds = [expected_tokens(engine.layout, prompt, max_tokens, VOCABULARY, sample) for sample in range(samples)]
        ends = frozenset(rng.choice(colds)[-3:]) if rng.random() < 0.3 else frozenset()
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            n=samples,
            prompt_logprobs=rng.choice([None] * 9 + [0]),
        )
        # Ids come again as soon as they are free.
        name = f"r{self.count % 12}"
        if core_knows(engine.core, name, samples):
            name = f"n{self.count}"
        request = make_request(
            name,
            prompt,
            max_tokens,
            n=samples,
            params=params,
            priority=rng.randrange(3),
            cache_salt=salt,
            end_token_ids=ends,
            no_store=rng.random() < 0.1,
            kv_transfer_params={"do_remote_decode": True} if rng.random() < 0.1 else None,
            checkpoint_at=tuple(rng.sample(range(1, longest), rng.choice([0, 0, 2]))),
        )
        for sample, cold in zip((request, *request.siblings), colds, strict=True):
            self.audit.book.learn([*prompt, *cold], salt)
            self.requests.append((engine, sample, cold))
        self.answers.append([*prompt, *colds[0]])
        engine.core.add_request(request)

    def check_finished(self) -> None:
        """Every answer is the cold one, up to where it ended."""
        for entry in list(self.requests):
            _, request, cold = entry
            reason = request.finish_reason
            if reason is None:
                continue
            self.requests.remove(entry)
            answer = request.output_token_ids
            assert reason is not FinishReason.ERROR or "planted" in (request.error or ""), request.error
            assert answer == cold[: len(answer)], f"{request.request_id} answers differently: {request.hit_report}"
            if reason is FinishReason.LENGTH:
                assert len(answer) == request.max_tokens
            if request.num_cached_tokens is not None and request.sample_index == 0:
                report = request.hit_report
                assert 0 <= request.num_cached_tokens < request.num_tokens
                assert report.boundary == request.num_cached_tokens
                assert min([0, *report.lost.values(), *report.cached_by_tier.values()]) == 0
        self.audit.check()


def core_knows(core: EngineCore, name: str, samples: int) -> bool:
    """Whether one of the ids a request of that name would take is in use."""
    return any(core.scheduler.knows(taken) for taken in (name, *(f"{name}#{i}" for i in range(1, samples))))
