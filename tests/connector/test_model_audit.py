"""What engines on real models store is what a cold run of the same checkpoint computes."""

import random

import pytest
import torch

from dalsegno.config import CacheConfig, SchedulerConfig
from dalsegno.connector.config import KVTransferConfig
from dalsegno.connector.registry import ConnectorContext, create_connector
from dalsegno.engine.core import EngineCore
from dalsegno.kv.layout import MemoryLayout, plan_layout
from dalsegno.models.base import CausalLM
from dalsegno.models.registry import load_model
from dalsegno.sched.connection import ConnectorSetup
from dalsegno.store.keys import StoreKey
from dalsegno.store.memory import MemoryStore
from dalsegno.store.objects import HEADER_BYTES, StoreObject, put_objects, unpack_header
from dalsegno.testing.auditing_store import AuditingStore
from dalsegno.testing.builders import make_request, run_all
from dalsegno.testing.fake_worker import FakeClock
from dalsegno.testing.model_audit import ModelAuditor
from dalsegno.types import GroupKind
from dalsegno.worker.model_worker import ModelWorker
from tests.conftest import LONG
from tests.connector.engines import Unclosable
from tests.matrix.tiny_models import tiny_kinds_with, tiny_model

H, B, LONGEST = 16, 32, 160
CONFIG = CacheConfig(B, H, decode_checkpoint_interval=H)
KINDS = tiny_kinds_with(GroupKind.STATE) if LONG else ("qwen3-next", "bamba", "lfm2")
KINDS += ("qwen3-window",)


def run_engine(model: CausalLM, layout: MemoryLayout, store: MemoryStore, budget: int) -> list[list[int]]:
    """Prefill in chunks, preempt, abort, finish; return all tokens that were worked on."""
    clock = FakeClock()
    scheduler, (connector,) = create_connector(
        KVTransferConfig("StoreConnector", "kv_both", {"store": Unclosable(store), "store_block_size": 2 * B}),
        ConnectorContext(layout, CONFIG, {"weights": "w"}, clock),
    )
    worker = ModelWorker(model, layout, torch.device("cpu"), connector)
    setup = ConnectorSetup(scheduler)
    core = EngineCore(worker, clock, layout, CONFIG, SchedulerConfig(LONGEST, budget), debug=True, connector=setup)
    rng = random.Random(3)
    prompts = [rng.choices(range(model.vocab_size), k=length) for length in (20, 64, 100)]
    requests = [make_request(f"r{i}", prompt, 30) for i, prompt in enumerate(prompts)]
    for request in requests:
        core.add_request(request)
    for _ in range(12):
        core.step()
    core.scheduler._preempt(core.scheduler.running[-1])
    core.abort("r1")
    run_all(core)
    assert core.wait_for_connector(1000)
    core.close()
    return [request.token_ids.tolist() for request in requests]


def altered(key: StoreKey, value: bytes) -> StoreObject:
    """The object with one value changed, under a header that is right about it."""
    payload = bytearray(value[HEADER_BYTES:])
    values = torch.frombuffer(payload, dtype=torch.float32)
    values[len(values) // 2] += 0.01 * (1 + values.abs().max())
    header = unpack_header(value)
    assert header is not None
    return StoreObject(key, header.num_tokens, [memoryview(payload)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [24, 256] if LONG else [24])
def test_what_a_real_model_has_put_is_what_a_cold_run_gives(kind: str, budget: int) -> None:
    """27, 29, 31: with chunks, a preemption, an abort and answers. One value that is changed is noticed."""
    model = load_model(tiny_model(kind), torch.float32, torch.device("cpu"))
    layout = plan_layout(model.cache_specs(), CONFIG, num_slabs=200)
    store = MemoryStore()
    tokens = run_engine(model, layout, store, budget)
    entries = {key: entry.payload for key, entry in store._entries.items()}
    assert len(entries) > 6
    audit = AuditingStore(MemoryStore(), layout, H, 2 * B, ModelAuditor(model, layout, LONGEST))
    for known in tokens:
        audit.book.learn(known)
    audit.put(list(entries), [[memoryview(value)] for value in entries.values()])
    audit.check()
    assert audit.num_audited == len(entries)
    put_objects(audit, [altered(key, value) for key, value in entries.items()])
    assert len(audit.failures) == len(entries)
