"""The scheduler side of a MultiConnector: who loads, who saves, and what the engine is told.

Each child is bound to a pool of its own: the same blocks, and pins that only it can give back. A hand-off is passed to
every child that saves it, with pins of its own. A load belongs to the one child whose hit was taken; what others say
of it is not passed on.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dalsegno.connector.base import BoundPool, ConnectorOutput, ExternalMatch, MatchStatus, SchedulerConnector
from dalsegno.connector.multi.child_pins import ChildPins
from dalsegno.connector.multi.children import Child, merged_stats
from dalsegno.connector.multi.completions import Completions
from dalsegno.connector.multi.messages import MultiMeta, MultiReport
from dalsegno.kv.hand_off import HandOff
from dalsegno.kv.loads import Load
from dalsegno.kv.tables import ComputedBlocks
from dalsegno.request import Request
from dalsegno.types import LoadFailure, StepPlan

__all__ = ["MultiScheduler"]

_Child = Child[SchedulerConnector]
_Register = Callable[[Request, Sequence[Sequence[int]], Sequence[HandOff]], bool | None]
_NONE = ExternalMatch(MatchStatus.NONE)


class MultiScheduler(SchedulerConnector):
    """See `SchedulerConnector`. Every notification reaches every child, whatever another one does."""

    def __init__(self, children: Sequence[SchedulerConnector], world_size: int) -> None:
        """Decide with `children`, earlier ones first, for `world_size` ranks."""
        self._children = [Child(index, side) for index, side in enumerate(children)]
        self._completions = Completions(world_size)
        self._chosen: dict[Request, int] = {}
        # (child, all of a load) for each load that the child it was meant for did not take.
        self._refused: list[tuple[int, LoadFailure]] = []
        # Children that could not say what their worker sides are to do: they have no push work until they can.
        self._mute: set[int] = set()

    def bind_block_pool(self, pool: BoundPool) -> None:
        """See the base class; a child that raises here keeps the engine from starting."""
        super().bind_block_pool(pool)
        self._pins = [ChildPins(pool.pins) for _ in self._children]
        for child, pins in zip(self._children, self._pins, strict=True):
            child.side.bind_block_pool(replace(pool, pins=pins))

    def on_progress(self, callback: Callable[[], None]) -> None:
        """See the base class."""
        for child in self._children:
            child.side.on_progress(callback)

    # Saving.

    def saves(self, request: Request, boundary: int) -> bool:
        """Whether a child does."""
        return bool(self._savers(request, boundary))

    def first_needed(self, request: Request, group_id: int, boundary: int, listed: int) -> int:
        """See `HandOffSink.first_needed`: what some child needs that saves the boundary."""
        needed = [
            # A child that was not given the earlier hand-off needs what that one lists.
            child.ask(
                boundary,
                child.side.first_needed,
                request,
                group_id,
                boundary,
                listed if self._has_saver(child, request, listed) else 0,
            )
            for child in self._savers(request, boundary)
        ]
        return min(needed, default=boundary)

    def register_partial_tail(
        self, request: Request, block_ids: Sequence[Sequence[int]], offloads: Iterable[HandOff]
    ) -> None:
        """See the base class; children are called once per hand-off."""
        for hand_off in offloads:
            for child, own in self._shared(request, [hand_off]):
                self._hand_over(child, child.side.register_partial_tail, request, block_ids, own)

    def register_finished_partial_tail(
        self, request: Request, block_ids: Sequence[Sequence[int]], offloads: Iterable[HandOff]
    ) -> bool:
        """See the base class; all but the last hand-off are registered before."""
        offloads = list(offloads)
        self.register_partial_tail(request, block_ids, offloads[:-1])
        asked = {
            child.index
            for child, own in self._shared(request, offloads[-1:])
            if self._hand_over(child, child.side.register_finished_partial_tail, request, block_ids, own)
        }
        self._completions.end_request(request.request_id, asked)
        return bool(asked)

    def request_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See the base class."""
        self._chosen.pop(request, None)
        answers = [
            child.ask((False, None), child.side.request_finished, request, block_ids) for child in self._children
        ]
        asked = {index for index, (delays, _) in enumerate(answers) if delays}
        self._completions.finish_request(request.request_id, asked)
        return bool(asked), _merged([answer for _, answer in answers])

    def is_answer_held(self, request: Request) -> bool:
        """Whether a child holds it."""
        return any(child.ask(False, child.side.is_answer_held, request) for child in self._children)

    def take_transfer_params(self, request: Request) -> dict[str, Any] | None:
        """What the children say, merged; each one's own words are under "connectors"."""
        return _merged([child.ask(None, child.side.take_transfer_params, request) for child in self._children])

    def forget_prefix(self, request: Request) -> None:
        """See `HandOffSink.forget_prefix`."""
        for child in self._children:
            child.ask(None, child.side.forget_prefix, request)

    # Looking up and loading.

    def get_num_new_matched_tokens(self, request: Request, local: ComputedBlocks) -> ExternalMatch:
        """The longest hit of a child, of several the first child's; pending while a child's answer is."""
        self._chosen.pop(request, None)
        matches = [child.ask(_NONE, child.side.get_num_new_matched_tokens, request, local) for child in self._children]
        statuses = {match.status for match in matches}
        if MatchStatus.PENDING in statuses:
            return ExternalMatch(MatchStatus.PENDING)
        shared = max(match.shared_tokens for match in matches)
        unsure = any(match.unsure for match in matches)
        hits = [match.num_tokens if match.status is MatchStatus.HIT else 0 for match in matches]
        longest = hits.index(max(hits))
        if hits[longest] > 0:
            self._chosen[request] = longest
            return replace(matches[longest], shared_tokens=shared, unsure=unsure)
        status = MatchStatus.NONE if statuses == {MatchStatus.NONE} else MatchStatus.MISS
        return ExternalMatch(status, shared_tokens=shared, unsure=unsure)

    def update_state_after_alloc(self, request: Request, load: Load) -> None:
        """The child whose hit it is loads; if it raises, it does not, and the load is reported as failed."""
        child = self._children[self._chosen.pop(request)]
        self._completions.begin_load(load.load_id, child.index)
        child.ask(None, child.side.update_state_after_alloc, request, load)
        if child.raised:
            groups = range(len(self.pool.layout.groups))
            self._refused += ((child.index, LoadFailure(load.load_id, group, 0, load.boundary)) for group in groups)

    # Speaking with the worker sides.

    def build_connector_meta(self, plan: StepPlan) -> MultiMeta | None:
        """See the base class."""
        parts: list[object | None] = []
        self._mute.clear()
        for child in self._children:
            parts.append(child.ask(None, child.side.build_connector_meta, plan))
            if child.raised:
                self._mute.add(child.index)
        refused, self._refused = tuple(self._refused), []
        if not refused and all(part is None for part in parts):
            return None
        return MultiMeta(tuple(parts), refused)

    def has_pending_push_work(self) -> bool:
        """See the base class."""
        return bool(self._refused) or any(
            child.index not in self._mute and child.ask(False, child.side.has_pending_push_work)
            for child in self._children
        )

    def has_pending_jobs(self) -> bool:
        """See the base class; of a child that raises what it has pinned tells."""
        return self._completions.awaits_loads or any(
            child.ask(bool(pins.counts), child.side.has_pending_jobs)
            for child, pins in zip(self._children, self._pins, strict=True)
        )

    def update_connector_output(self, output: ConnectorOutput) -> None:
        """Tell each child what its own worker side reports, and the engine what all of that comes to."""
        report = output.worker_meta
        if not isinstance(report, MultiReport):
            return
        for child, part in zip(self._children, report.parts, strict=True):
            if part is None:
                continue
            own = replace(part, sent=set(part.sent), received=set(part.received), rank=output.rank)
            child.ask(None, child.side.update_connector_output, own)
            self._completions.take(child.index, own, output)

    # The whole.

    def reset_cache(self) -> bool:
        """Whether every child could."""
        done = [child.ask(False, child.side.reset_cache) for child in self._children]
        return all(done)

    def take_events(self) -> Iterable[object]:
        """Those of all children."""
        events: list[object] = []
        for child in self._children:
            events += child.ask([], _take_events, child.side)
        return events

    def stats(self) -> Mapping[str, int | float]:
        """See `merged_stats`."""
        return merged_stats(self._children, "errors")

    def shutdown(self) -> None:
        """See the base class."""
        for child in self._children:
            child.ask(None, child.side.shutdown)

    # Inside.

    def _savers(self, request: Request, boundary: int) -> list[_Child]:
        return [child for child in self._children if self._has_saver(child, request, boundary)]

    def _has_saver(self, child: _Child, request: Request, boundary: int) -> bool:
        return child.ask(False, child.side.saves, request, boundary)

    def _shared(self, request: Request, offloads: Sequence[HandOff]) -> list[tuple[_Child, list[HandOff]]]:
        """Each child with those it saves, one pin per entry of its own; the pins that came with them are given back."""
        own: list[list[HandOff]] = [[] for _ in self._children]
        for hand_off in offloads:
            for child in self._savers(request, hand_off.boundary):
                own[child.index].append(hand_off)
                for group, block in hand_off.blocks():
                    self._pins[child.index].pin(group, block)
            self.pool.pins.unpin(hand_off.blocks())
        return list(zip(self._children, own, strict=True))

    def _hand_over(
        self,
        child: _Child,
        register: _Register,
        request: Request,
        block_ids: Sequence[Sequence[int]],
        own: Sequence[HandOff],
    ) -> bool:
        """Register at one child; whether it wants the table kept. If it raises, it has not taken `own` over."""
        pins = self._pins[child.index]
        given = Counter(entry for hand_off in own for entry in hand_off.blocks())
        before = {entry: pins.counts[entry] - count for entry, count in given.items()}
        delays = child.ask(False, register, request, block_ids, own)
        if child.raised:
            for entry, count in given.items():
                pins.unpin([entry] * min(count, pins.counts[entry] - before[entry]))
        return bool(delays)


def _take_events(side: SchedulerConnector) -> list[object]:
    return list(side.take_events())


def _merged(answers: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """One answer of several: the first child's word for each key, but the longest of the boundaries stored."""
    if all(answer is None for answer in answers):
        return None
    merged: dict[str, Any] = {}
    for answer in answers:
        merged = {**(answer or {}), **merged}
    boundaries = [answer["stored_boundary"] for answer in answers if answer and "stored_boundary" in answer]
    if boundaries:
        merged["stored_boundary"] = max(boundaries)
    return {**merged, "connectors": list(answers)}
