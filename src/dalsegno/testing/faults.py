"""Faults planted one at a time into a running engine core, to show that the checks can fail.

Each fault is one bug that public engines have had. `plant(core, name)` patches one core; nothing else is touched, and a
core with a fault is thrown away afterwards.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dalsegno.engine.core import EngineCore
from dalsegno.kv.lookup import find_hit
from dalsegno.kv.tables import ComputedBlocks, RequestBlocks, StateBlocks
from dalsegno.request import Request
from dalsegno.types import NULL_BLOCK, BlockCopy, ScheduledRequest, StateExport, StateStep, StepPlan, StepResult

__all__ = ["FAULTS", "Fault", "plant"]

Fault = Callable[[EngineCore], None]


def plant(core: EngineCore, name: str) -> None:
    """Plant the fault `name`, one of `FAULTS`, into `core`."""
    FAULTS[name](core)


def _patch_plans(core: EngineCore, change: Callable[[StepPlan], StepPlan]) -> None:
    """Let the worker execute changed plans while the core believes in its own."""
    execute = core.worker.execute

    def changed(plan: StepPlan) -> StepResult:
        return execute(change(plan))

    _set(core.worker, "execute", changed)


def _patch_state(core: EngineCore, change: Callable[[ScheduledRequest, StateStep], StateStep]) -> None:
    def change_plan(plan: StepPlan) -> StepPlan:
        requests = tuple(
            replace(request, state=change(request, request.state)) if request.state is not None else request
            for request in plan.requests
        )
        return replace(plan, requests=requests)

    _patch_plans(core, change_plan)


def _set(target: Any, name: str, value: Any) -> None:
    setattr(target, name, value)


def _resumes(request: ScheduledRequest, state: StateStep) -> bool:
    return state.read_block not in (NULL_BLOCK, state.write_block)


def _state_zeroed_at_hit(core: EngineCore) -> None:
    _patch_state(core, lambda r, s: replace(s, read_block=NULL_BLOCK) if _resumes(r, s) else s)


def _neighbours_state(core: EngineCore) -> None:
    """A hit reads the state of another prefix."""
    group = core.layout.state_group
    assert group is not None, "the fault needs a state group"

    def change(request: ScheduledRequest, state: StateStep) -> StateStep:
        others = [b for b in core.manager.index.published(group.group_id) if b != state.read_block]
        return replace(state, read_block=others[-1]) if _resumes(request, state) and others else state

    _patch_state(core, change)


def _copy_skipped(core: EngineCore) -> None:
    _patch_plans(core, lambda plan: replace(plan, copies=()))


def _source_freed_early(core: EngineCore) -> None:
    """The source of a copy is given away before the copy has run."""
    take_copies = core.manager.take_copies

    def take() -> tuple[BlockCopy, ...]:
        copies = take_copies()
        for copy in copies:
            core.worker.poison(copy.group_id, [copy.source])
        return copies

    _set(core.manager, "take_copies", take)


def _published_at_schedule_time(core: EngineCore) -> None:
    """A hash becomes visible when its block is allocated, before anything is written."""
    manager = core.manager
    allocate = manager.allocate_slots

    def allocate_and_publish(
        request: Request, new_tokens: int, computed: ComputedBlocks | None = None, **options: Any
    ) -> RequestBlocks | None:
        blocks = allocate(request, new_tokens, computed, **options)
        if blocks is not None:
            written = (request.num_computed_tokens + new_tokens) // manager.unit
            end = min(written, len(request.block_hashes)) * manager.unit
            for group in manager.paged:
                group.publish(
                    blocks.tables[group.spec.group_id], request.root_hash, request.block_hashes, blocks.published, end
                )
            if manager.state is not None and blocks.state is not None and blocks.state.write and end:
                manager.state.publish(request.root_hash, request.block_hashes, end, blocks.state.write)
            blocks.planned.clear()
        return blocks

    _set(manager, "allocate_slots", allocate_and_publish)


def _last_token_rule_dropped(core: EngineCore) -> None:
    """A state at exactly N serves a resend: its last token is applied twice."""
    manager = core.manager
    get = manager.get_computed_blocks
    chunk = core.scheduler._chunk  # noqa: SLF001

    def get_all(request: Request) -> Any:
        computed, boundary, report = get(request)
        whole = find_hit(manager.index, request.root_hash, request.block_hashes, request.num_tokens)
        return (whole, whole.boundary, report) if whole.boundary == request.num_tokens else (computed, boundary, report)

    def at_least_one(request: Request, start: int, budget: int) -> int:
        return chunk(request, min(start, request.num_tokens - 1), budget)

    allocate = manager.allocate_slots

    def step_back(request: Request, new_tokens: int, computed: ComputedBlocks | None = None, **options: Any) -> Any:
        blocks = allocate(request, new_tokens, computed, **options)
        if blocks is not None and computed is not None and computed.boundary == request.num_tokens:
            request.num_computed_tokens -= 1
        return blocks

    _set(manager, "get_computed_blocks", get_all)
    _set(manager, "allocate_slots", step_back)
    _set(core.scheduler, "_chunk", at_least_one)
    _set(core.scheduler, "_note_admission", lambda request, boundary, report: None)


def _export_one_unit_off(core: EngineCore) -> None:
    """The state exported for a junction or mark is that of one unit earlier."""
    unit = core.manager.unit

    def change(request: ScheduledRequest, state: StateStep) -> StateStep:
        exports = tuple(StateExport(max(1, e.num_tokens - unit), e.block) for e in state.exports)
        return replace(state, exports=exports)

    _patch_state(core, change)


def _frozen_state_written(core: EngineCore) -> None:
    """The step after a freeze goes on in the published block."""
    state = core.manager.state
    assert state is not None, "the fault needs a state group"

    def in_place(blocks: StateBlocks, **_: Any) -> tuple[bool, bool]:
        blocks.write = blocks.current
        return False, False

    _set(state, "choose_write", in_place)


def _chunk_end_state_under_boundary(core: EngineCore) -> None:
    """The state at the end of a chunk is filed under the boundary below, wherever the chunk ended."""
    manager = core.manager
    publish = manager.publisher.publish_step

    def publish_running(request: Request, blocks: RequestBlocks, after: int) -> None:
        publish(request, blocks, after)
        boundary = after // manager.unit * manager.unit
        if manager.state is not None and blocks.state is not None and boundary:
            manager.state.publish(request.root_hash, request.block_hashes, boundary, blocks.state.current)

    _set(manager.publisher, "publish_step", publish_running)


def _answer_state_overwritten(core: EngineCore) -> None:
    """A request that ends publishes its running state as the answer's last boundary."""
    manager = core.manager
    state = manager.state
    assert state is not None, "the fault needs a state group"

    def last(blocks: StateBlocks, num_computed: int, unit: int) -> tuple[int, int] | None:
        return (num_computed // unit * unit, blocks.current) if num_computed >= unit else None

    _set(state, "last_restorable", last)


def _shared_tail_written(core: EngineCore) -> None:
    """A hit inside a block goes on in the shared block instead of a copy."""
    coordinator, pool = core.manager.coordinator, core.manager.pool
    share = coordinator._share  # noqa: SLF001

    def share_tail(blocks: RequestBlocks, group_id: int, *given: Any) -> None:
        before = len(blocks.copies)
        share(blocks, group_id, *given)
        table = blocks.tables[group_id]
        for copy in blocks.copies[before:]:
            # The table takes the reference that the copy held on its source.
            table[table.index(copy.target)] = copy.source
            pool.unpin(group_id, copy.target)
        del blocks.copies[before:]

    _set(coordinator, "_share", share_tail)


def _unwritten_token_counted(core: EngineCore) -> None:
    """The last sampled token counts as computed: a unit is published whose last token no forward ever wrote."""
    manager = core.manager
    publish_last_state = manager.publish_last_state

    def publish_more(request: Request, *, finished: bool) -> None:
        publish_last_state(request, finished=finished)
        manager.publisher.extend_hashes(request)
        blocks, end = manager.requests[request.request_id], request.num_tokens
        if finished and end % manager.unit == 0:
            for group in manager.paged:
                table = blocks.tables[group.spec.group_id]
                if len(table) == group.num_blocks(end):
                    group.publish(table, request.root_hash, request.block_hashes, blocks.published, end)
            if manager.state is not None and blocks.state is not None:
                manager.state.publish(request.root_hash, request.block_hashes, end, blocks.state.current)

    _set(manager, "publish_last_state", publish_more)


def _preempted_tokens_kept(core: EngineCore) -> None:
    """A preempted request goes on where it was, in blocks that hold nothing of it."""
    manager = core.manager
    get = manager.get_computed_blocks

    def from_foreign_blocks(request: Request) -> Any:
        computed, boundary, report = get(request)
        if request.num_preemptions and boundary >= manager.unit:
            shifted = find_hit(manager.index, computed.root, computed.hashes, boundary - manager.unit)
            if shifted.state_block:
                computed = replace(computed, state_block=shifted.state_block)
        return computed, boundary, report

    _set(manager, "get_computed_blocks", from_foreign_blocks)


def _window_left_early(core: EngineCore) -> None:
    """A window group gives its oldest block back while the next token still sees it."""
    for group in core.manager.paged:
        leave = group.leave_window

        def early(
            table: list[int],
            released: int,
            num_tokens: int,
            leave: Callable[[list[int], int, int], int] = leave,
            block_size: int = group.spec.block_size,
        ) -> int:
            return leave(table, released, num_tokens + block_size)

        _set(group, "leave_window", early)


def _salt_ignored(core: EngineCore) -> None:
    """All requests share one key domain; answers stay right, isolation does not."""
    start = core.manager.start_request

    def unsalted(request: Request) -> None:
        salt, request.cache_salt = request.cache_salt, None
        start(request)
        request.cache_salt = salt

    _set(core.manager, "start_request", unsalted)


FAULTS: dict[str, Fault] = {
    "answer_state_overwritten": _answer_state_overwritten,
    "chunk_end_state_under_boundary": _chunk_end_state_under_boundary,
    "copy_skipped": _copy_skipped,
    "export_one_unit_off": _export_one_unit_off,
    "frozen_state_written": _frozen_state_written,
    "last_token_rule_dropped": _last_token_rule_dropped,
    "neighbours_state": _neighbours_state,
    "preempted_state_one_unit_off": _preempted_tokens_kept,
    "published_at_schedule_time": _published_at_schedule_time,
    "salt_ignored": _salt_ignored,
    "shared_tail_written": _shared_tail_written,
    "source_freed_early": _source_freed_early,
    "state_zeroed_at_hit": _state_zeroed_at_hit,
    "unwritten_token_counted": _unwritten_token_counted,
    "window_left_early": _window_left_early,
}
