"""One request (one sample of one prompt) as scheduler and KV manager see it."""

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto, unique
from typing import Any

from dalsegno.hit_report import HitReport
from dalsegno.sampling_params import SamplingParams
from dalsegno.types import BlockHash, TokenLogprobs

__all__ = ["FinishReason", "Request", "RequestStatus", "RequestUpdate"]


@unique
class RequestStatus(Enum):
    """Where a request is in its life."""

    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()
    FINISHED = auto()


@unique
class FinishReason(Enum):
    """Why a request ended; the values are what the API reports."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(eq=False, slots=True)
class Request:
    """Tokens, hashes and progress of one request.

    Invariants: `token_ids` is the prompt followed by the sampled tokens; tokens `[0, num_computed_tokens)` have KV
    and state on the device and `num_computed_tokens < num_tokens` while the request can run; `block_hashes[i]` names
    tokens `[0, (i + 1) * H)` and covers full units only. The request holds no block ids: those are the manager's.

    Attributes:
        root_hash: hash of zero tokens in this request's key domain (salt, adapter).
        checkpoint_at: token counts the caller wants a state kept at.
        num_wait_steps: steps spent waiting for a common prefix that a running request computes.
        awaited_boundary: the boundary waited for; 0 for none.
        shared_boundary: up to where an external store has attention of somebody with the same prefix.
        order: (priority, arrival number), smaller first; set by the scheduler.
        seed: key of the random streams.
        sample_index: which of the prompt's samples this is; sample 0 carries the prefill of all of them.
        no_store: nothing of it goes to an external store.
        kv_transfer_params: what the caller tells the connector.
        kv_transfer_answer: what the connector tells the caller once the request has ended.
        siblings: on sample 0, the other samples, which start from its prefill.
        logprobs: a row per sampled token, where the request asks for them.
        prompt_logprobs: a row per prompt token after the first, as far as they have come, on sample 0 only.
        num_cached_tokens: prompt tokens not computed at first admission; None before it.
        hit_report: the hit of the first admission.
        prefill_target: tokens known at the last admission; computing up to there is prefill.
        num_states_kept: boundary states published for this request.
        num_prefilled_tokens: tokens computed in prefill as the worker counted, after preemptions too.
        first_prompt_row: rows of the prompt before this one are not asked for.
        background: a run of the engine's own: it finds nothing, publishes nothing, counts nowhere and samples nothing.
        witness_until: tokens sampled at positions before this one are witnessed.
        witness: (position, row) of sampled tokens that a cold run will be compared with.
        packed: it ran out of room with nothing beside it; from now on it runs alone and packed, see `RequestBlocks`.
    """

    request_id: str
    token_ids: "array[int]"
    params: SamplingParams
    arrival_time: float
    cache_salt: str | None = None
    priority: int = 0
    checkpoint_at: tuple[int, ...] = ()
    end_token_ids: frozenset[int] = frozenset()
    max_tokens: int = 16
    seed: int = 0
    sample_index: int = 0
    no_store: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    siblings: "list[Request]" = field(default_factory=list)

    root_hash: BlockHash = BlockHash(b"")
    block_hashes: list[BlockHash] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    kv_transfer_answer: dict[str, Any] | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    num_cached_tokens: int | None = None
    hit_report: HitReport = field(default_factory=HitReport)
    prefill_target: int = 0
    num_states_kept: int = 0
    num_prefilled_tokens: int = 0
    first_prompt_row: int = 0
    background: bool = False
    witness_until: int = 0
    witness: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    num_preemptions: int = 0
    num_wait_steps: int = 0
    packed: bool = False
    awaited_boundary: int = 0
    shared_boundary: int = 0
    order: tuple[int, int] = (0, 0)
    first_token_time: float | None = None
    finish_time: float | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and what was sampled."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Sampled tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Whether rows of the prompt are still to come; until then the request resumes from no cached prefix."""
        asks = self.params.prompt_logprobs is not None and self.sample_index == 0
        return asks and self.num_prompt_rows < self.num_prompt_tokens - 1

    @property
    def num_prompt_rows(self) -> int:
        """Rows of the prompt that have come, or were not asked for."""
        return self.first_prompt_row + len(self.prompt_logprobs)

    @property
    def looks_nothing_up(self) -> bool:
        """Whether no cached prefix may be resumed from, wherever it lies."""
        return self.packed or self.awaits_prompt_logprobs

    @property
    def max_total_tokens(self) -> int:
        """Most tokens this request will ever know."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The sampled tokens, oldest first."""
        return self.token_ids[self.num_prompt_tokens :].tolist()


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """What a step did for one request; a finished one carries its finish reason, stop reason and error itself."""

    request: Request
    new_token_ids: list[int]
    finished: bool
