"""What a caller gets back: one `RequestOutput` per prompt, under the names vLLM users know."""

from dataclasses import dataclass
from typing import Any

from dalsegno.hit_report import HitReport

__all__ = ["CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely the model found a token at some position.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: its place among all tokens, 1 for the likeliest.
        decoded_token: its text alone, None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a prompt.

    Attributes:
        index: which of the prompt's samples this is.
        text: the answer so far, without special tokens; it ends before a stop string or a stop token.
        token_ids: all sampled ids, the one that stopped the answer included.
        finish_reason: "stop", "length", "abort", "error", or None while the answer goes on.
        stop_reason: the stop string or the id of `stop_token_ids` that ended the answer; None for an end token.
        error: what failed, where `finish_reason` is "error".
        cumulative_logprob: sum over the sampled tokens; None unless `logprobs` were asked for.
        logprobs: per sampled token, by id: itself, then the likeliest; None unless asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None

    @property
    def finished(self) -> bool:
        """Whether this sample has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened, in seconds of the engine's clock, and what was computed.

    Attributes:
        arrival_time: the request was accepted.
        first_token_time: the first token of the first sample was there; None before it.
        finish_time: the last sample ended; None before it.
        num_prefilled_tokens: tokens prefilled as the worker counted them, those repeated after preemptions included.
        num_preemptions: how often a sample lost its blocks to another request.
        num_states_kept: boundary states published for later requests, all samples.
    """

    arrival_time: float
    first_token_time: float | None = None
    finish_time: float | None = None
    num_prefilled_tokens: int = 0
    num_preemptions: int = 0
    num_states_kept: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of one prompt, complete or (while streaming) as far as it is.

    Attributes:
        request_id: the engine's name of the request.
        prompt: the text of the prompt, None where it was given as token ids.
        prompt_token_ids: the prompt's ids.
        outputs: the samples, by index.
        num_cached_tokens: prompt tokens that were not computed at first admission, whatever tier had them; None before.
        hit_report: how long the hit was, and what became of the rest of the prompt; None before admission.
        metrics: times and counts.
        finished: whether every sample has ended.
        prompt_logprobs: per prompt token, by id: itself, then the likeliest at its place; None for the first token. The
            whole is None unless asked for, and until every row is there.
        kv_transfer_params: what the connector says of the finished request; with `do_remote_decode`, how many of its
            tokens the store can restore (`stored_boundary`).
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int | None
    hit_report: HitReport | None
    metrics: RequestMetrics
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    kv_transfer_params: dict[str, Any] | None = None
