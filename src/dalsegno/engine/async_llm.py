"""The asynchronous Python API: the same prompts, parameters and results as `LLM`, as streams in event loops.

The engine lives on a thread of its own; any number of tasks, also of several event loops, use it at once.
"""

import asyncio
import dataclasses
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from inspect import Signature
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar
from weakref import WeakValueDictionary

from dalsegno.engine.batches import Batch, BatchMaker
from dalsegno.engine.build import Engine, build_engine
from dalsegno.engine.chat import MessageLike
from dalsegno.engine.engine_thread import EngineThread, Ticket
from dalsegno.engine.inputs import PromptLike
from dalsegno.engine.llm import options_signature
from dalsegno.engine.options import EngineOptions
from dalsegno.engine.outputs import RequestOutput
from dalsegno.errors import RequestError
from dalsegno.sampling_params import SamplingParams

__all__ = ["AsyncLLM", "OutputStream"]

_T = TypeVar("_T")


class _Mailbox:
    """Where the engine thread leaves what a stream waits for. It knows no stream, so that a dropped one can end."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.awaited: asyncio.Future[RequestOutput] | None = None

    def deliver(self, output: RequestOutput) -> None:
        """See `Consumer.deliver`."""
        self._settle(lambda future: future.set_result(output))

    def fail(self, error: BaseException) -> None:
        """See `Consumer.fail`."""
        self._settle(lambda future: future.set_exception(error))

    def _settle(self, act: Callable[["asyncio.Future[RequestOutput]"], None]) -> None:
        """Act in the consumer's loop; that may be closed by now, and then nobody waits."""

        def settle() -> None:
            if self.awaited is not None and not self.awaited.done():
                act(self.awaited)

        if self.loop is not None:
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(settle)


class OutputStream(AsyncIterator[RequestOutput]):
    """The results of one prompt while it grows, the last one with `finished`; texts are whole and only grow.

    A consumer that is slower than the engine gets the latest result. The prompt is checked and queued when the first
    one is asked for. Closing or dropping the stream, or cancelling the task that waits for it, aborts the request.
    """

    def __init__(
        self, thread: EngineThread, make: Callable[[], Batch], request_id: str | None, end: Callable[[], None]
    ) -> None:
        """See `AsyncLLM.generate`; `end` is called once, when the stream is over."""
        self._thread = thread
        self._make = make
        self._request_id = request_id
        self._end = end
        self._mailbox = _Mailbox()
        self._ticket = Ticket(self._mailbox)
        self._over = False
        self._is_read = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """Return the next result.

        Raises:
            RequestError, OptionError: the prompt or its parameters are not allowed, or the engine has been closed.
            EngineError: the engine has stopped.
        """
        if self._over:
            raise StopAsyncIteration
        if self._is_read:
            raise RequestError("a stream is read by one task at a time, and another one is waiting for its next result")
        self._is_read = True
        try:
            output = await self._await_output()
        except BaseException:
            self._close()
            raise
        finally:
            self._is_read = False
        if output.finished:
            self._finish()
        return output if self._request_id is None else dataclasses.replace(output, request_id=self._request_id)

    async def aclose(self) -> None:
        """Abort what is unfinished."""
        self._close()

    def __del__(self) -> None:
        if not self._over:
            self._close()

    def abort(self) -> None:
        """End the request; the next result is its last, with what it has so far. One that was not begun has none."""
        if self._mailbox.loop is None:
            self._close()
        else:
            self._thread.end(self._ticket)

    async def _await_output(self) -> RequestOutput:
        loop = asyncio.get_running_loop()
        if self._mailbox.loop is None:
            # Tokenising a long prompt takes longer than a loop may be held up.
            batch = await asyncio.to_thread(self._make)
            self._mailbox.loop = loop
            self._check_open()
            await asyncio.wrap_future(self._thread.submit(batch, [self._ticket]))
        elif self._mailbox.loop is not loop:
            raise RequestError("a stream belongs to the event loop in which its first result was asked for")
        self._check_open()
        self._mailbox.awaited = loop.create_future()
        try:
            if not self._thread.await_output(self._ticket):
                raise self._thread.closed_error()
            return await self._mailbox.awaited
        finally:
            self._mailbox.awaited = None

    def _check_open(self) -> None:
        """Whoever closed the stream while it was being prepared has ended the wait as well."""
        if self._over:
            raise StopAsyncIteration

    def _close(self) -> None:
        if not self._over:
            self._thread.drop(self._ticket)
            self._finish()
            # Another task may be waiting for the next result.
            self._mailbox.fail(StopAsyncIteration())

    def _finish(self) -> None:
        self._over = True
        self._end()


class AsyncLLM:
    """A model, its cache and its scheduler on a thread of their own, for event loops.

    Args:
        model: a folder in Hugging Face form, or a hub id such as "owner/name".
        options: those of `LLM`.

    Attributes:
        options: the options as they were given.

    Raises:
        OptionError, CheckpointError: as `LLM`.
    """

    __signature__: ClassVar[Signature] = options_signature()

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        self.options = EngineOptions.from_keywords(options, "AsyncLLM")
        self._model = os.fspath(model)
        self._engine: Engine = build_engine(model, self.options)
        self._batches = BatchMaker(self._engine, self.options)
        # Tokenizers are not promised to be safe in several threads at once.
        self._making = threading.Lock()
        self._thread = EngineThread(self._engine)
        # Weak, so that a stream nobody holds ends.
        self._streams: WeakValueDictionary[str, OutputStream] = WeakValueDictionary()

    def generate(
        self, prompt: PromptLike, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> OutputStream:
        """Answer one prompt; iterate over the result with `async for`.

        Args:
            prompt: as a prompt of `LLM.generate`.
            sampling_params: None takes the defaults of `get_default_sampling_params`.
            request_id: a name for `abort`, of no other unfinished request; results carry it.

        Raises:
            RequestError: the name is taken, or the engine has been closed. What is wrong with the prompt is raised
                when the first result is asked for.
        """
        return self._stream(lambda: self._batches.prompts([prompt], sampling_params), request_id)

    def chat(
        self,
        messages: Sequence[MessageLike],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> OutputStream:
        """Answer one conversation; arguments as for `generate` and `LLM.chat`."""

        def make() -> Batch:
            return self._batches.conversations(
                messages, sampling_params, tools, add_generation_prompt, chat_template_kwargs
            )

        return self._stream(make, request_id)

    async def abort(self, request_id: str) -> None:
        """End a request by its name; its stream ends with what it has so far. Unknown names are ignored."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.abort()

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of `transformers` that this engine uses.

        Raises:
            RequestError: the engine was made with `skip_tokenizer_init`.
        """
        return self._batches.tokenizer.backend

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what is used where no parameters are given, see `LLM`."""
        return self._batches.default_params()

    @property
    def start_up_plan(self) -> str:
        """How the memory is cut, how many tokens and states fit, and the shortest prompt that can hit."""
        return self._engine.start_up_plan

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""
        return self._thread.is_running

    @property
    def errored(self) -> bool:
        """Whether the engine has stopped because something in it failed."""
        return self._thread.error is not None

    async def check_health(self) -> None:
        """Return if the engine takes requests.

        Raises:
            EngineError: it has stopped.
            RequestError: it has been closed.
        """
        if not self.is_running:
            raise self._thread.closed_error()

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_external: bool = False) -> bool:
        """See `LLM.reset_prefix_cache`."""
        return await self._call(
            lambda: self._engine.core.reset_prefix_cache(
                reset_running_requests=reset_running_requests, reset_external=reset_external
            )
        )

    async def stats(self) -> dict[str, int | float]:
        """See `LLM.stats`."""
        return await self._call(self._engine.core.stats)

    async def verify(self) -> None:
        """See `LLM.verify`."""
        await self._call(self._engine.core.verify)

    def shutdown(self) -> None:
        """Drop what is unfinished, whose streams raise, and give back the memory; a second call does nothing."""
        self._thread.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    def __repr__(self) -> str:
        return f"AsyncLLM({self._model!r}{'' if self.is_running else ', closed'})"

    def _stream(self, make: Callable[[], Batch], request_id: str | None) -> OutputStream:
        if not self.is_running:
            raise self._thread.closed_error()

        def make_alone() -> Batch:
            with self._making:
                return make()

        if request_id is None:
            return OutputStream(self._thread, make_alone, None, lambda: None)
        if request_id in self._streams:
            raise RequestError(f"request ids of unfinished requests are unique, {request_id!r} is not")
        stream = OutputStream(self._thread, make_alone, request_id, lambda: self._forget(request_id))
        self._streams[request_id] = stream
        return stream

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    async def _call(self, function: Callable[[], _T]) -> _T:
        return await asyncio.wrap_future(self._thread.call(function))
