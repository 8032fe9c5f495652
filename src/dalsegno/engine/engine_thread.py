"""The thread an asynchronous engine lives on: work comes in through an inbox, outputs go to whoever waits for them.

Everything of the engine is touched on this thread alone. It sleeps while there is nothing to do and is woken by work;
an output is made only when its consumer waits for one, so a slow consumer gets the latest and holds nobody up.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from dalsegno.engine.batches import Batch
from dalsegno.engine.build import Engine
from dalsegno.engine.front_end import Answer
from dalsegno.engine.outputs import RequestOutput
from dalsegno.errors import EngineError, RequestError

__all__ = ["Consumer", "EngineThread", "Ticket"]

_T = TypeVar("_T")

logger = logging.getLogger(__name__)

# For the store's reports; work that comes in ends it.
_WAIT_S = 1.0


class Consumer(Protocol):
    """Who waits for a prompt's outputs. Called on the engine thread; must return at once."""

    def deliver(self, output: RequestOutput) -> None:
        """Take an output that was waited for."""
        ...

    def fail(self, error: BaseException) -> None:
        """No output will come any more."""
        ...


class Ticket:
    """One prompt on its way through the engine; written on the engine thread, but for `is_awaited`.

    Attributes:
        is_awaited: whether the consumer waits for an output; set by it, taken back when one is delivered.
    """

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.answer: Answer | None = None
        self.is_awaited = False
        self.is_dropped = False
        self.num_shown = 0


class EngineThread:
    """Owns an engine from now on. Public methods may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        """Start the thread."""
        self._engine = engine
        self._inbox: deque[Callable[[], None]] = deque()
        self._wanted = threading.Condition()
        self._tickets: set[Ticket] = set()
        self._stopping = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dalsegno-engine", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether work is still taken."""
        return self._thread.is_alive() and self.error is None and not self._stopping

    def submit(self, batch: Batch, tickets: Sequence[Ticket]) -> "Future[None]":
        """Queue checked prompts, each with the ticket that follows it; either all of them or none."""

        def queue() -> None:
            if any(ticket.is_dropped for ticket in tickets):
                return
            for ticket, answer in zip(tickets, self._engine.front_end.submit(batch), strict=True):
                ticket.answer = answer
                self._tickets.add(ticket)

        return self.call(queue)

    def drop(self, ticket: Ticket) -> None:
        """Nobody wants the ticket's outputs any more: what is unfinished of it is aborted."""
        ticket.is_dropped = True
        self._post(lambda: self._forget(ticket))

    def end(self, ticket: Ticket) -> None:
        """End the ticket's requests; their last output says that they were aborted."""

        def abort() -> None:
            if ticket.answer is not None:
                self._engine.front_end.end([ticket.answer])

        self._post(abort)

    def await_output(self, ticket: Ticket) -> bool:
        """Have the next output delivered that shows more than the last one; False if none can come any more."""
        ticket.is_awaited = True
        return self._post(lambda: None)

    def call(self, function: Callable[[], _T]) -> "Future[_T]":
        """Run a function between two steps."""
        future: Future[_T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        if not self._post(run):
            future.set_exception(self.closed_error())
        return future

    def close(self) -> None:
        """Drop what is unfinished, close the engine and end the thread; a second call does nothing."""
        with self._wanted:
            self._stopping = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def closed_error(self) -> Exception:
        """Why no work is taken any more."""
        if self.error is not None:
            return EngineError(f"the engine has stopped: {type(self.error).__name__}: {self.error}")
        return RequestError("this engine has been closed; what was unfinished has been dropped")

    # On the engine thread.

    def _run(self) -> None:
        core = self._engine.core
        try:
            while self._wait_for_work():
                while self._inbox:
                    self._inbox.popleft()()
                if core.has_unfinished_requests or core.has_pending_checks:
                    self._engine.front_end.step()
                elif core.has_background_work:
                    core.serve_connector(_WAIT_S)
                self._publish()
        except BaseException as error:
            self.error = error
            logger.exception("the engine has stopped")
        finally:
            self._shut_down()

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False when the thread is to end."""
        core = self._engine.core
        with self._wanted:
            while not (
                self._stopping
                or self._inbox
                or core.has_unfinished_requests
                or core.has_pending_checks
                or core.has_background_work
                or any(map(self._is_due, self._tickets))
            ):
                self._wanted.wait()
            return not self._stopping

    def _is_due(self, ticket: Ticket) -> bool:
        answer = ticket.answer
        return ticket.is_awaited and answer is not None and (answer.finished or answer.num_tokens > ticket.num_shown)

    def _publish(self) -> None:
        for ticket in [ticket for ticket in self._tickets if self._is_due(ticket)]:
            assert ticket.answer is not None, "a ticket that is due has an answer"
            ticket.is_awaited = False
            ticket.num_shown = ticket.answer.num_tokens
            output = ticket.answer.output()
            if output.finished:
                self._tickets.discard(ticket)
            ticket.consumer.deliver(output)

    def _forget(self, ticket: Ticket) -> None:
        if ticket in self._tickets:
            self._tickets.discard(ticket)
            assert ticket.answer is not None, "a ticket that was queued has an answer"
            self._engine.front_end.abort([ticket.answer])

    def _shut_down(self) -> None:
        with self._wanted:
            self._stopping = True
            left = list(self._inbox)
            self._inbox.clear()
        error = self.closed_error()
        for ticket in self._tickets:
            ticket.consumer.fail(error)
        self._tickets.clear()
        try:
            self._engine.front_end.close()
        except Exception:
            logger.exception("the engine could not be closed")
        # Those who call get their answer: that the engine is closed.
        for task in left:
            task()

    # From any thread.

    def _post(self, task: Callable[[], None]) -> bool:
        with self._wanted:
            if self._stopping:
                return False
            self._inbox.append(task)
        self._wake()
        return True

    def _wake(self) -> None:
        with self._wanted:
            self._wanted.notify()
        # It may also be waiting for a connector, inside a step.
        self._engine.core.worker.port.wake()
