"""A store job owns its blocks until it is reported: whatever becomes of its request, the bytes it puts are right."""

import random
import threading
from collections.abc import Sequence

import pytest

from dalsegno.config import CacheConfig
from dalsegno.kv.layout import MemoryLayout
from dalsegno.request import FinishReason, Request
from dalsegno.store.base import Status, Store
from dalsegno.store.keys import StoreKey
from dalsegno.store.memory import MemoryStore
from dalsegno.store.wrappers.wrapped import WrappedStore
from dalsegno.testing.auditing_store import AuditingStore, CellAuditor
from dalsegno.testing.builders import make_layout
from tests.connector.engines import VOCABULARY, StoreEngine

H, B = 16, 32
PROMPT = random.Random(1).choices(range(VOCABULARY), k=150)


class GatedStore(WrappedStore):
    """Lets nothing of the sender's through before it is opened: blocks are read only then."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.opened = threading.Event()

    def exists(self, keys: Sequence[StoreKey]) -> list[Status]:
        if threading.current_thread().name.startswith("dalsegno-sender"):
            assert self.opened.wait(60), "the gate was never opened"
        return super().exists(keys)


def audited(kinds: str) -> AuditingStore:
    layout: MemoryLayout = make_layout(kinds, CacheConfig(B, H), num_slabs=2)
    return AuditingStore(MemoryStore(), layout, H, 2 * B, CellAuditor())


def fill(engine: StoreEngine, audit: AuditingStore) -> None:
    """Let other requests have every block that nobody owns."""
    for seed in range(10, 18):
        prompt = random.Random(seed).choices(range(VOCABULARY), k=280)
        audit.book.learn([*prompt, *engine.expected(prompt, 5)])
        engine.send(prompt, 5)
    assert engine.core.stats()["num_evicted_blocks"] > 0


def until(engine: StoreEngine, request: Request, num_computed: int) -> None:
    while request.num_computed_tokens < num_computed:
        engine.core.step()


@pytest.mark.parametrize("then", ["finish", "abort", "stop", "preempt", "reset", "reset external"])
@pytest.mark.parametrize("kinds", ["as", "a", "aws", "ws", "s"])
def test_whatever_becomes_of_the_request_its_jobs_put_right_bytes_or_none(kinds: str, then: str) -> None:
    """27, 34, 75, R6: freed blocks are poisoned and taken by others before the sender reads."""
    audit = audited(kinds)
    store = GatedStore(audit)
    with StoreEngine(store, kinds, max_model_len=300, budget=48, num_slabs=45 if kinds != "s" else 9) as engine:
        audit.book.learn([*PROMPT, *engine.expected(PROMPT, 40)])
        request = engine.request(PROMPT, 40, checkpoint_at=(48, 96))
        engine.core.add_request(request)
        until(engine, request, 170 if then in ("finish", "stop", "preempt") else 96)
        assert engine.core.stats()["kv_offload_jobs"] > 0
        if then == "finish":
            engine.run()
        elif then == "abort":
            engine.core.abort(request.request_id)
        elif then == "stop":
            engine.core.stop(request.request_id, "a stop string")
        elif then == "preempt":
            engine.core.scheduler._preempt(request)
        else:
            external = then == "reset external"
            assert engine.core.reset_prefix_cache(reset_running_requests=True, reset_external=external)
            engine.core.abort(request.request_id)
        engine.core.step()
        num_audited = audit.num_audited
        fill(engine, audit)
        engine.run()
        assert audit.num_audited == num_audited == 0
        store.opened.set()
        engine.settle()
        audit.check()
        answer = request.output_token_ids
        assert answer == engine.expected(PROMPT, 40)[: len(answer)]
        assert engine.core.reset_prefix_cache()
        again = engine.send(PROMPT, 5)
        if then == "reset external":
            assert request.finish_reason is FinishReason.ABORT
            assert again.num_cached_tokens == 0
        else:
            assert again.num_cached_tokens == (96 if then in ("abort", "reset") else 144), again.hit_report
        engine.settle()
    audit.check()


@pytest.mark.parametrize("kinds", ["as", "aws"])
def test_the_audit_notices_blocks_that_a_job_does_not_own(kinds: str) -> None:
    """The checks can fail: with its pins dropped, a job puts what others wrote, or poison."""
    audit = audited(kinds)
    store = GatedStore(audit)
    engine = StoreEngine(store, kinds, max_model_len=300, budget=48, num_slabs=45)
    audit.book.learn([*PROMPT, *engine.expected(PROMPT, 5)])
    engine.send(PROMPT, 5)
    pins = engine.core.manager.pins
    pins.unpin([key for key, count in list(pins.counts.items()) for _ in range(count)])
    fill(engine, audit)
    store.opened.set()
    for _ in range(2000):
        engine.reports.collect()
        if audit.failures:
            break
        engine.worker.port.wait(0.01)
    with pytest.raises(AssertionError, match="wrong puts"):
        audit.check()
    engine.worker.close()


def test_the_audit_notices_a_put_nobody_worked_on() -> None:
    audit = audited("as")
    with StoreEngine(audit) as engine:
        engine.send(PROMPT)
        engine.settle()
    with pytest.raises(AssertionError, match="nobody works on this prefix"):
        audit.check()
