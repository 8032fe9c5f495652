"""`verify_prefix_cache` on real models: every fault that spoils a hit is found and forgotten, and nothing else is."""

import dataclasses
from collections.abc import Callable

import pytest

from dalsegno.config import CacheConfig, SchedulerConfig
from dalsegno.engine.core import EngineCore
from dalsegno.kv.layout import plan_layout
from dalsegno.kv.manager import KVCacheManager
from dalsegno.models.tiny import TINY_KINDS
from dalsegno.request import Request
from dalsegno.sched.cold_checks import ColdCheckSetup, Mismatch
from dalsegno.testing.faults import FAULTS, plant
from dalsegno.types import GroupKind
from tests.conftest import LONG
from tests.matrix.backends import Logits
from tests.matrix.test_faults import TELLTALE
from tests.matrix.test_switch_matrix import FAMILIES, backend_of, reference
from tests.matrix.tiny_models import tiny_kinds_with
from tests.matrix.workload import MAX_MODEL_LEN, UNIT, Cell, Prompt, add

FOUND_OTHERWISE = {"salt_ignored", "window_left_early", "source_freed_early", "published_at_schedule_time"}
"""Faults that spoil no hit of this workload, or end a request with an error."""


def make_engine(name: str, cell: Cell, setup: ColdCheckSetup) -> tuple[EngineCore, Logits]:
    """An engine as the matrix makes it, without counting every step (a fault would show there too)."""
    backend = backend_of(name)
    config = CacheConfig(block_size=cell.block_size, hash_block_size=UNIT, decode_checkpoint_interval=cell.interval)
    layout = plan_layout(backend.specs, config, num_slabs=2)
    need = KVCacheManager(layout, config, max_step_tokens=cell.budget).slabs_alone(MAX_MODEL_LEN)
    slabs = {"need": need, "one more": need + 1, "double": 2 * need, "large": 10 * need}[cell.pool]
    layout = layout.with_slabs(slabs + 1)
    logits: Logits = {}
    worker = backend.worker(layout, logits, (), {})
    scheduling = SchedulerConfig(MAX_MODEL_LEN, cell.budget)
    return EngineCore(worker, backend.clock, layout, config, scheduling, cold_checks=setup), logits


def finish(core: EngineCore, preempt_every: int = 0) -> None:
    step = 0
    while core.has_unfinished_requests or core.has_pending_checks:
        core.step()
        step += 1
        running = core.scheduler.running
        if preempt_every and step % preempt_every == 0 and running and running[-1].num_output_tokens:
            core.scheduler._preempt(running[-1])
        assert step < 5000


def play(core: EngineCore, name: str, phases: list[list[Prompt]], preempt_every: int = 0) -> dict[str, Request]:
    requests: dict[str, Request] = {}
    for phase in phases:
        for prompt in phase:
            requests |= {request.request_id: request for request in add(core, backend_of(name), prompt)}
        finish(core, preempt_every)
    return requests


CHECKED = {"qwen3-next", "granite-hybrid", "qwen3"}
TINY_STATEFUL = tiny_kinds_with(GroupKind.STATE)


@pytest.mark.parametrize("cell", [Cell(), Cell(budget=23, pool="double", preempt_every=3, block_size=48)], ids=str)
@pytest.mark.parametrize("kind", TINY_KINDS if LONG else sorted(CHECKED & set(TINY_KINDS)))
def test_without_a_fault_nothing_differs(kind: str, cell: Cell) -> None:
    found: list[Mismatch] = []
    phases, _ = reference(kind)
    core, _ = make_engine(kind, cell, ColdCheckSetup(1.0, report=found.append))
    requests = play(core, kind, phases, cell.preempt_every)
    stats = core.stats()
    core.verify()
    assert found == []
    checked = [r for r in requests.values() if r.num_cached_tokens]
    assert stats["prefix_cache_verified"] + stats["prefix_cache_verify_dropped"] >= len(checked) > 0
    assert stats["prefix_cache_verify_dropped"] == 0
    assert stats["prefix_cache_verify_ties"] <= 1


@pytest.mark.parametrize("fault", sorted(set(FAULTS) - FOUND_OTHERWISE))
@pytest.mark.parametrize("kind", TINY_STATEFUL if LONG else FAMILIES[:1])
def test_a_fault_that_spoils_a_hit_is_found_and_the_next_answer_is_cold(kind: str, fault: str) -> None:
    phases, cold = reference(kind)
    prompts = [prompt for phase in phases for prompt in phase]
    alone = fault != "chunk_end_state_under_boundary"
    for cell in (TELLTALE.get(fault, Cell()), Cell(budget=64, pool="double"), Cell(budget=64, pool="one more")):
        found: list[Mismatch] = []
        core, _ = make_engine(kind, cell, ColdCheckSetup(1.0, report=found.append))
        repair = plant_for_a_while(core, fault)
        for batch in [[prompt] for prompt in prompts] if alone else phases:
            play(core, kind, [batch], cell.preempt_every)
            if found:
                break
        if not found:
            continue
        assert core.stats()["prefix_cache_mismatches"] == len(found)
        assert found[0].forgotten
        repair()
        prompt = next(p for p in prompts if p.name == found[-1].request.request_id.split(" #")[0])
        again = dataclasses.replace(prompt, name="again")
        [request, *_] = play(core, kind, [[again]]).values()
        assert not alone or request.num_cached_tokens == 0, "the chain is still found"
        assert request.output_token_ids == cold.tokens[prompt.name]
        return
    pytest.fail(f"{fault} is not found")


def plant_for_a_while(core: EngineCore, fault: str) -> Callable[[], None]:
    """Plant a fault; what is returned takes it out again."""
    manager = core.manager
    parts = [core.worker, core.scheduler, manager, manager.coordinator, manager.publisher, manager.state]
    before = [set(vars(part)) for part in parts]
    plant(core, fault)

    def repair() -> None:
        for part, names in zip(parts, before, strict=True):
            for name in set(vars(part)) - names:
                delattr(part, name)

    return repair
