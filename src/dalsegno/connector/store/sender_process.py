"""The sender in a process of its own, so that it shares no interpreter lock with the engine.

The process maps the same device memory, opens the store for itself and runs a `Sender`; what is to be done goes to it
through a pipe, reports come back. It is lost only when it has exited: then its jobs are reported as not stored, and the
next push starts another process.
"""

import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dalsegno.connector.host_bytes import HostBytes
from dalsegno.connector.store.keys import KeyMaker
from dalsegno.connector.store.messages import JobReport, StepMeta, StoredObject
from dalsegno.connector.store.pressure import PressureGate
from dalsegno.connector.store.sender import SENDER_COUNTERS, Sender
from dalsegno.kv.layout import MemoryLayout

__all__ = ["ProcessSender", "SenderSetup", "serve"]

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class SenderSetup:
    """What the process needs; all of it can be pickled.

    Attributes:
        store: settings of the store.
        keys: keys of the rank.
        layout: how the memory is cut.
        memory_path: where the shared memory can be opened.
        pressure_pause_s: see `PressureGate`.
        cleared: see `Sender`.
    """

    store: Mapping[str, Any]
    keys: KeyMaker
    layout: MemoryLayout
    memory_path: str
    pressure_pause_s: float
    cleared: int = 0


@dataclass(frozen=True, slots=True)
class _Progress:
    """What the process has done since it last spoke; `counters` are totals."""

    reports: tuple[JobReport, ...]
    cleared: int
    num_clears: int
    counters: dict[str, int]


class ProcessSender:
    """Has the methods of `Sender`; the process behind it is started by the first push.

    Attributes:
        cleared, num_clears: see `Sender`; what a process was asked for and did not do has failed.
    """

    def __init__(self, setup: SenderSetup, on_progress: Callable[[], None]) -> None:
        """Start nothing yet; `on_progress` is called on a thread of this object's own."""
        self._setup = setup
        self._on_progress = on_progress
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        # One guards what is told and counted, the other who starts and feeds the process.
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._asked_clears = 0
        self._lost_clears = 0
        self._pending: dict[int, None] = {}
        self._reports: deque[JobReport] = deque()
        self._done: Counter[str] = Counter(dict.fromkeys((*SENDER_COUNTERS, "kv_offload_workers_lost"), 0))
        self._running: dict[str, int] = {}
        self.cleared = 0
        self.num_clears = 0

    @property
    def counters(self) -> Counter[str]:
        """Counters of this process and those before it."""
        with self._lock:
            total = Counter(self._done)
            total.update(self._running)
            return total

    def push(self, step_meta: StepMeta) -> None:
        """See `Sender.push`."""
        with self._lock:
            self._asked_clears += step_meta.clear
            self._pending.update((job.job_id, None) for job in step_meta.jobs)
        self._send(step_meta)

    def touch(self, salt: str, objects: Sequence[StoredObject]) -> None:
        """See `Sender.touch`."""
        self._send((salt, tuple(objects)))

    def take(self) -> tuple[JobReport, ...]:
        """See `Sender.take`."""
        return tuple(self._reports.popleft() for _ in range(len(self._reports)))

    def close(self) -> None:
        """End the process behind the put it is at; in a fork of the engine's process nothing is done."""
        if os.getpid() != self._owner:
            return
        process, pipe = self._process, self._pipe
        if process is None or pipe is None:
            return
        self._process = None
        # It may have exited by itself.
        with suppress(OSError):
            pipe.send(None)
        try:
            process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        pipe.close()

    @property
    def is_alive(self) -> bool:
        """Never: the process has a store of its own."""
        return False

    def _send(self, message: object) -> None:
        with self._send_lock:
            try:
                if self._process is None:
                    self._start()
                assert self._pipe is not None, "a running process has a pipe"
                self._pipe.send(message)
            except BrokenPipeError:
                # Its end is noticed, and told, by the thread that listens to it.
                logger.warning("the store's sender has exited")
            except OSError:
                logger.exception("the store's sender cannot be started")
                with self._lock:
                    self._forget_jobs()
                self._on_progress()

    def _start(self) -> None:
        # Not a child of multiprocessing, which would import the caller's main module a second time.
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()})"]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=_environment(), process_group=0)
        self._pipe = Connection(ours.detach())
        self._pipe.send(replace(self._setup, cleared=self.cleared))
        threading.Thread(
            target=self._listen, args=(self._pipe, self._process), name="dalsegno-sender-listener", daemon=True
        ).start()

    def _listen(self, pipe: Connection, process: "subprocess.Popen[bytes]") -> None:
        """Take what the process says until it has exited."""
        while True:
            try:
                progress = pipe.recv()
            except (EOFError, OSError):
                break
            self._take_progress(progress)
        process.wait()
        if self._process is process:
            self._lose()

    def _take_progress(self, progress: _Progress) -> None:
        with self._lock:
            for report in progress.reports:
                self._pending.pop(report.job_id, None)
            self._running = progress.counters
            self._reports.extend(progress.reports)
            self.cleared = max(self.cleared, progress.cleared)
            self.num_clears = self._lost_clears + progress.num_clears
        self._on_progress()

    def _lose(self) -> None:
        """The process has exited unasked: nothing it was given will be reported by it."""
        logger.error("the store's sender has exited; %d jobs are not stored", len(self._pending))
        with self._lock:
            # In one piece: what is pushed from here on belongs to the next process.
            self._process = None
            self._done.update(self._running)
            self._done["kv_offload_workers_lost"] += 1
            self._running = {}
            self._forget_jobs()
        self._on_progress()

    def _forget_jobs(self) -> None:
        """Report every job that is pending as not stored, and every clearing as failed; the lock is held."""
        self.num_clears = self._lost_clears = self._asked_clears
        self._reports.extend(JobReport(job_id) for job_id in self._pending)
        self._pending.clear()


def _environment() -> dict[str, str]:
    """The environment in which the process finds this very package."""
    root = str(Path(__file__).parents[3])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


def serve(file: int) -> None:
    """Be the process: a sender over the engine's memory, fed from the socket `file` until that ends."""
    from dalsegno.store.registry import open_store

    # A Ctrl-C is the engine's to answer; its end is the end of the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Connection(file)
    setup: SenderSetup = pipe.recv()
    with open(setup.memory_path, "r+b") as slabs:
        memory = memoryview(mmap.mmap(slabs.fileno(), 0))
    store = open_store(setup.store)
    lock = threading.Lock()

    def tell() -> None:
        with lock:
            # `cleared` is read behind the count, so that a success is never taken for a failure.
            reports, num_clears = sender.take(), sender.num_clears
            # The engine may be gone, and with it whoever would care.
            with suppress(OSError):
                pipe.send(_Progress(reports, sender.cleared, num_clears, dict(sender.counters)))

    gate = PressureGate(time.monotonic, setup.pressure_pause_s)
    sender = Sender(store, setup.keys, setup.layout, HostBytes(setup.layout, memory), gate, tell, setup.cleared)
    try:
        while (message := pipe.recv()) is not None:
            if isinstance(message, StepMeta):
                sender.push(message)
            else:
                sender.touch(*message)
    except (EOFError, OSError):
        pass  # the engine is gone
    finally:
        sender.close()
        store.close()
