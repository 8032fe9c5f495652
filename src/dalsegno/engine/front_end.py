"""Between callers and the engine core: checked prompts go in, results with text come out.

One `Answer` follows one prompt, whoever waits for it; a step advances all of them. Stop strings are found here, since
only here there is text. Used from one thread, the engine's; only `abort` may come at any moment, since the garbage
collector closes a stream that was dropped wherever it finds it, inside a step too.
"""

import hashlib
import os
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from dalsegno.engine.core import EngineCore, RequestUpdate
from dalsegno.engine.detokenizer import Detokenizer, TextDecoder
from dalsegno.engine.inputs import Prompt
from dalsegno.engine.interrupts import uninterrupted
from dalsegno.engine.logprobs import LogprobReader
from dalsegno.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from dalsegno.errors import RequestError
from dalsegno.request import FinishReason, Request
from dalsegno.sampling_params import SamplingParams
from dalsegno.types import Clock

__all__ = ["Answer", "FrontEnd"]


class _Sample:
    """One sample of an answer: its request, and the text of what it has sampled."""

    def __init__(self, request: Request, tokenizer: TextDecoder | None, logprobs: LogprobReader) -> None:
        params = request.params
        self.request = request
        self.detokenizer = Detokenizer(tokenizer, params.stop, params.min_tokens)
        self.finished = False
        self._reader = logprobs
        self._logprobs: list[dict[int, Logprob]] = []

    def take(self, update: RequestUpdate) -> bool:
        """Take new tokens; return whether a stop string was found in a request that the core has not ended."""
        request = self.request
        token_ids = update.new_token_ids
        by_token = request.finish_reason is FinishReason.STOP and not isinstance(request.stop_reason, str)
        if update.finished and by_token:
            token_ids = token_ids[:-1]
        found = self.detokenizer.push(token_ids)
        if not update.finished:
            return found
        self.detokenizer.finish()
        self.finished = True
        return False

    def output(self) -> CompletionOutput:
        request = self.request
        reason = request.finish_reason.value if self.finished and request.finish_reason else None
        stop_reason = request.stop_reason
        # A stop string may be complete with the very token that ended the request for another reason.
        if reason in ("stop", "length") and self.detokenizer.stop_string is not None:
            reason, stop_reason = "stop", self.detokenizer.stop_string
        asked = request.params.logprobs is not None
        self._logprobs += self._reader.read(request.logprobs[len(self._logprobs) :])
        return CompletionOutput(
            index=request.sample_index,
            text=self.detokenizer.text,
            token_ids=request.output_token_ids,
            finish_reason=reason,
            stop_reason=stop_reason if reason else None,
            error=request.error if reason == "error" else None,
            cumulative_logprob=sum(row.logprobs[0] for row in request.logprobs) if asked else None,
            logprobs=list(self._logprobs) if asked else None,
        )


class Answer:
    """What has come of one prompt so far."""

    def __init__(
        self, prompt: Prompt, requests: Sequence[Request], tokenizer: TextDecoder | None, logprobs: LogprobReader
    ) -> None:
        self._prompt = prompt
        self._prompt_token_ids = prompt.token_ids.tolist()
        self.samples = [_Sample(request, tokenizer, logprobs) for request in requests]
        self._reader = logprobs
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.finished for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens, all samples."""
        return sum(sample.request.num_output_tokens for sample in self.samples)

    def output(self) -> RequestOutput:
        """Return the result as far as it is."""
        requests = [sample.request for sample in self.samples]
        first = requests[0]
        ends = [request.finish_time for request in requests if request.finish_time is not None]
        return RequestOutput(
            request_id=first.request_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[sample.output() for sample in self.samples],
            num_cached_tokens=first.num_cached_tokens,
            hit_report=first.hit_report,
            metrics=RequestMetrics(
                arrival_time=first.arrival_time,
                first_token_time=first.first_token_time,
                finish_time=max(ends) if self.finished and ends else None,
                num_prefilled_tokens=sum(request.num_prefilled_tokens for request in requests),
                num_preemptions=sum(request.num_preemptions for request in requests),
                num_states_kept=sum(request.num_states_kept for request in requests),
            ),
            finished=self.finished,
            prompt_logprobs=self._read_prompt_logprobs(),
            kv_transfer_params=first.kv_transfer_answer,
        )

    def _read_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        first = self.samples[0].request
        if self._prompt_logprobs is None and first.params.prompt_logprobs is not None:
            if first.awaits_prompt_logprobs:
                return None
            self._prompt_logprobs = [None, *self._reader.read(first.prompt_logprobs)]
        return self._prompt_logprobs


class FrontEnd:
    """Queues prompts, advances the engine and keeps the answers up to date.

    Args:
        core: the engine.
        clock: of the engine, for arrival times.
        tokenizer: None gives answers without text and refuses stop strings.
        vocab_size: ids are below this.
        end_token_ids: ids that end an answer unless `ignore_eos`.
        max_model_len: prompt and answer together are at most this long.
        seed: what the random streams of requests without a seed are derived from.
    """

    def __init__(
        self,
        core: EngineCore,
        clock: Clock,
        tokenizer: TextDecoder | None,
        *,
        vocab_size: int,
        end_token_ids: Iterable[int],
        max_model_len: int,
        seed: int = 0,
    ) -> None:
        self._core = core
        self._clock = clock
        self._tokenizer = tokenizer
        self._logprobs = LogprobReader(tokenizer)
        self._vocab_size = vocab_size
        self._end_token_ids = frozenset(end_token_ids)
        self._max_model_len = max_model_len
        self._seed = seed
        self._num_submitted = 0
        self._samples: dict[str, _Sample] = {}
        self._owner = os.getpid()
        self._closed = False
        # Held while the core is at work: who comes in between leaves his aborts to the step that is under way.
        self._busy = threading.Lock()
        self._left_aborts = False

    def check(self, params: SamplingParams, where: str = "sampling_params") -> None:
        """Raise `RequestError` if this engine cannot sample as asked."""
        if params.stop and self._tokenizer is None:
            raise RequestError(f"{where}: stop strings need a tokenizer, and this engine has none; use stop_token_ids")
        for name, token_ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
            for token_id in token_ids:
                if token_id >= self._vocab_size:
                    raise RequestError(
                        f"{where}: {name} must be below the vocabulary's size of {self._vocab_size}, got {token_id}"
                    )

    def submit(self, batch: Sequence[tuple[Prompt, SamplingParams]]) -> list[Answer]:
        """Queue checked prompts; either all of them are queued or none.

        Raises:
            RequestError: one of them can never be served, and the others are taken back; or the engine is closed or
                in the middle of a step.
        """
        answers: list[Answer] = []
        try:
            with self._at_work(), uninterrupted():
                for prompt, params in batch:
                    answers.append(self._submit_one(prompt, params))
        except BaseException:
            self.abort(answers)
            raise
        return answers

    def step(self) -> None:
        """Advance the engine by one step and the answers with it; a Ctrl-C is raised after the step.

        Raises:
            RequestError: the engine is closed, or in the middle of a step.
        """
        with self._at_work():
            self._advance()

    def abort(self, answers: Iterable[Answer]) -> None:
        """End answers that nobody waits for; returns when the engine holds nothing of them, or inside a step at once.

        The step under way then takes them.
        """
        aborted = False
        for answer in answers:
            for sample in answer.samples:
                if self._samples.pop(sample.request.request_id, None) is not None:
                    self._core.abort(sample.request.request_id)
                    aborted = True
        if not aborted or self._closed:
            return
        self._left_aborts = True
        if self._busy.acquire(blocking=False):
            try:
                if not self._core.broken:
                    self._advance()
            finally:
                self._busy.release()

    def end(self, answers: Iterable[Answer]) -> None:
        """End answers that somebody still waits for: the next step finishes them as aborted."""
        for answer in answers:
            for sample in answer.samples:
                if not sample.finished:
                    self._core.abort(sample.request.request_id)

    def close(self) -> None:
        """Drop what is unfinished and give back the memory; a second call does nothing.

        Raises:
            RequestError: the engine is in the middle of a step.
        """
        if self._closed:
            return
        if os.getpid() != self._owner:
            self._closed = True
            return
        with self._at_work():
            self._closed = True
            self._samples.clear()
            self._core.close()

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request is queued or running, whoever waits for it."""
        return self._core.has_unfinished_requests

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        if self._closed:
            raise RequestError("this engine has been closed; what was unfinished has been dropped")
        if os.getpid() != self._owner:
            raise RequestError("this engine belongs to the process that made it; a fork of that must make its own")
        if not self._busy.acquire(blocking=False):
            raise RequestError(
                "this engine is in the middle of a step; use it from one thread, and not from inside one"
            )
        try:
            yield
        finally:
            self._busy.release()

    def _advance(self) -> None:
        """Step until no abort is left that came during a step."""
        while True:
            self._left_aborts = False
            with uninterrupted():
                for update in self._core.step():
                    self._take(update)
            if not self._left_aborts:
                return

    def _submit_one(self, prompt: Prompt, params: SamplingParams) -> Answer:
        number = self._num_submitted
        self._num_submitted += 1
        requests = [self._request(prompt, params, number, index) for index in range(params.n)]
        requests[0].siblings = requests[1:]
        self._core.add_request(requests[0])
        answer = Answer(prompt, requests, self._tokenizer, self._logprobs)
        self._samples |= {sample.request.request_id: sample for sample in answer.samples}
        return answer

    def _request(self, prompt: Prompt, params: SamplingParams, number: int, index: int) -> Request:
        room = self._max_model_len - len(prompt.token_ids)
        return Request(
            request_id=f"{number}" if index == 0 else f"{number}.{index}",
            token_ids=array("I", prompt.token_ids),
            params=params,
            arrival_time=self._clock.now(),
            cache_salt=prompt.cache_salt,
            priority=prompt.priority,
            checkpoint_at=prompt.checkpoint_at,
            no_store=prompt.no_store,
            kv_transfer_params=prompt.kv_transfer_params,
            end_token_ids=self._end_token_ids,
            max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
            seed=_request_seed(self._seed, number) if params.seed is None else params.seed,
            sample_index=index,
        )

    def _take(self, update: RequestUpdate) -> None:
        request_id = update.request.request_id
        sample = self._samples.get(request_id)
        if sample is None:
            return
        if sample.take(update):
            stop_string = sample.detokenizer.stop_string
            assert stop_string is not None, "a found stop string has a value"
            self._core.stop(request_id, stop_string)
        if sample.finished:
            del self._samples[request_id]


def _request_seed(engine_seed: int, number: int) -> int:
    """Seed of a request that set none: differs between requests, and is the same whenever the engine is run again."""
    digest = hashlib.sha256(f"dalsegno request {engine_seed} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
