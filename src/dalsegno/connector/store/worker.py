"""The store connector's worker side: the sender and the receiver of one rank."""

from collections.abc import Callable, Mapping

from dalsegno.connector.base import BlockMemory, WorkerConnector
from dalsegno.connector.registry import ConnectorContext
from dalsegno.connector.store.keys import KeyMaker
from dalsegno.connector.store.messages import StepMeta, WorkerMeta
from dalsegno.connector.store.pressure import PressureGate
from dalsegno.connector.store.receiver import Receiver
from dalsegno.connector.store.sender import Sender
from dalsegno.connector.store.sender_process import ProcessSender, SenderSetup
from dalsegno.connector.store.settings import StoreSettings
from dalsegno.connector.store.shared_store import SharedStore
from dalsegno.types import LoadFailure

__all__ = ["StoreWorker"]


class StoreWorker(WorkerConnector):
    """See `WorkerConnector`."""

    def __init__(self, shared: SharedStore, keys: KeyMaker, context: ConnectorContext, settings: StoreSettings) -> None:
        """Move the bytes of the rank whose `keys` these are."""
        self._shared = shared
        self._store = shared.store
        self._keys = keys
        self._context = context
        self._settings = settings
        self.needs_shared_memory = settings.uses_process
        self._callback: Callable[[], None] = lambda: None
        self._reported_clears = 0

    def on_progress(self, callback: Callable[[], None]) -> None:
        """See the base class."""
        self._callback = callback

    def register_kv_caches(self, memory: BlockMemory) -> None:
        """See the base class; starts the threads."""
        self._store.register(memory.memory)
        layout = self._context.layout
        pause = self._settings.pressure_pause_s
        self._sender: Sender | ProcessSender
        if self._settings.uses_process and memory.path is not None:
            setup = SenderSetup(self._settings.process_store, self._keys, layout, memory.path, pause)
            self._sender = ProcessSender(setup, self._progress)
        else:
            gate = PressureGate(self._context.clock.now, pause)
            self._sender = Sender(self._store, self._keys, layout, memory, gate, self._progress)
        self._receiver = Receiver(self._store, self._keys, layout, memory, self._sender.touch, self._progress)

    def start_load_kv(self, step_meta: object) -> None:
        """See the base class."""
        assert isinstance(step_meta, StepMeta), "a store connector's worker was given somebody else's meta"
        for job in step_meta.loads:
            self._receiver.push(job)

    def wait_for_save(self, step_meta: object) -> None:
        """See the base class."""
        assert isinstance(step_meta, StepMeta), "a store connector's worker was given somebody else's meta"
        self._sender.push(step_meta)

    def get_finished(self) -> tuple[set[str], set[int], list[LoadFailure]]:
        """See the base class."""
        done = self._receiver.take()
        return set(), {load_id for load_id, _ in done}, [failure for _, failures in done for failure in failures]

    def build_connector_worker_meta(self) -> WorkerMeta | None:
        """See the base class."""
        num_clears = self._sender.num_clears
        reports = self._sender.take()
        if not reports and num_clears == self._reported_clears:
            return None
        self._reported_clears = num_clears
        # Read behind the count, so that a success is never taken for a failure.
        return WorkerMeta(reports, self._sender.cleared, num_clears)

    def stats(self) -> Mapping[str, int | float]:
        """See the base class."""
        return {**self._sender.counters, **self._receiver.counters}

    def shutdown(self) -> None:
        """See the base class, also without `register_kv_caches` before; a store that hangs is left to its thread."""
        if not hasattr(self, "_receiver"):
            self._shared.leave()
            return
        self._receiver.close()
        self._sender.close()
        self._shared.leave(hangs=self._receiver.is_alive or self._sender.is_alive)

    def _progress(self) -> None:
        self._callback()
