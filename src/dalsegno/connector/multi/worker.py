"""The worker side of a MultiConnector on one rank: each child's worker side is told its own part, and reports it."""

from collections.abc import Callable, Mapping, Sequence

from dalsegno.connector.base import BlockMemory, ConnectorOutput, WorkerConnector
from dalsegno.connector.multi.children import Child, merged_stats
from dalsegno.connector.multi.messages import MultiMeta, MultiReport
from dalsegno.types import LoadFailure

__all__ = ["MultiWorker"]


class MultiWorker(WorkerConnector):
    """See `WorkerConnector`. What loads and requests have ended is for the scheduler side to say: it travels there."""

    def __init__(self, children: Sequence[WorkerConnector]) -> None:
        """Drive the children's worker sides of one rank."""
        self._children = [Child(index, side) for index, side in enumerate(children)]
        self._refused: list[tuple[int, LoadFailure]] = []

    @property
    def needs_shared_memory(self) -> bool:  # type: ignore[override]
        """Whether a child needs it."""
        return any(child.side.needs_shared_memory for child in self._children)

    def register_kv_caches(self, memory: BlockMemory) -> None:
        """See the base class; a child that raises here keeps the engine from starting."""
        for child in self._children:
            child.side.register_kv_caches(memory)

    def on_progress(self, callback: Callable[[], None]) -> None:
        """See the base class."""
        for child in self._children:
            child.side.on_progress(callback)

    def start_load_kv(self, step_meta: object) -> None:
        """See the base class."""
        assert isinstance(step_meta, MultiMeta), "a MultiConnector's worker was given somebody else's meta"
        self._refused += step_meta.refused
        for child, part in zip(self._children, step_meta.parts, strict=True):
            if part is not None:
                child.ask(None, child.side.start_load_kv, part)

    def wait_for_save(self, step_meta: object) -> None:
        """See the base class."""
        assert isinstance(step_meta, MultiMeta), "a MultiConnector's worker was given somebody else's meta"
        for child, part in zip(self._children, step_meta.parts, strict=True):
            if part is not None:
                child.ask(None, child.side.wait_for_save, part)

    def build_connector_worker_meta(self) -> MultiReport | None:
        """Return and forget everything that the children have to report."""
        refused, self._refused = self._refused, []
        parts = tuple(
            _collect(child, [failure for index, failure in refused if index == child.index]) for child in self._children
        )
        return MultiReport(parts) if any(parts) else None

    def stats(self) -> Mapping[str, int | float]:
        """See `merged_stats`."""
        return merged_stats(self._children, "worker_errors")

    def shutdown(self) -> None:
        """See the base class."""
        for child in self._children:
            child.ask(None, child.side.shutdown)


def _collect(child: Child[WorkerConnector], refused: Sequence[LoadFailure]) -> ConnectorOutput | None:
    """Ask one child; what one of its calls has returned counts although the other raises."""
    nothing: tuple[set[str], set[int], list[LoadFailure]] = set(), set(), []
    sent, received, failed = child.ask(nothing, _get_finished, child.side)
    received |= {failure.load_id for failure in refused}
    worker_meta = child.ask(None, child.side.build_connector_worker_meta)
    if not sent and not received and worker_meta is None:
        return None
    return ConnectorOutput(sent, received, [*failed, *refused], worker_meta)


def _get_finished(side: WorkerConnector) -> tuple[set[str], set[int], list[LoadFailure]]:
    sent, received, failed = side.get_finished()
    return set(sent), set(received), list(failed)
