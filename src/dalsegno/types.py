"""Values that more than one layer speaks: cache layer specs, the step plan, the step's result.

No torch and no behaviour here. The scheduler writes a `StepPlan`, the worker executes it and answers with a
`StepResult`; neither imports the other.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType, Protocol

from dalsegno.sampling_params import SamplingParams

__all__ = [
    "NULL_BLOCK",
    "BlockCopy",
    "BlockHash",
    "CachePart",
    "Clock",
    "GroupKind",
    "LayerCacheSpec",
    "LoadFailure",
    "PromptRows",
    "SampleSpec",
    "ScheduledRequest",
    "StateExport",
    "StateStep",
    "StepPlan",
    "StepResult",
    "TokenLogprobs",
]

BlockHash = NewType("BlockHash", bytes)
"""32-byte chained digest; names the whole prefix that ends at its boundary."""

NULL_BLOCK = 0
"""Every group's reserved block: all zeros, never allocated, written, cached or freed."""


class GroupKind(Enum):
    """What the layers of a KV-cache group keep."""

    ATTENTION = "attention"
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class CachePart:
    """One tensor of a layer's cache.

    `shape` is per token for attention and window layers (`[kv_heads, head_dim]`) and per state for state layers
    (`[heads, key_dim, value_dim]`, `[channels, kernel - 1]`). `dtype` is a torch dtype's name, such as "float32".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class LayerCacheSpec:
    """What one model layer keeps between steps; `window` (in tokens) is set for window layers only."""

    layer: int
    kind: GroupKind
    parts: tuple[CachePart, ...]
    window: int | None = None


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first `num_tokens` tokens of `source` to `target`, both blocks of group `group_id`."""

    group_id: int
    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StateExport:
    """Write the state after the request's first `num_tokens` tokens of this step into `block`."""

    num_tokens: int
    block: int


@dataclass(frozen=True, slots=True)
class StateStep:
    """Where a request's state is read from and written to in one step.

    `read_block` and `write_block` are the same block in steady state. They differ when the block that is read is
    shared or published: such a block is read, never written. The null block reads as zeros.
    """

    read_block: int
    write_block: int
    exports: tuple[StateExport, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Sample `len(sample_indices)` tokens from the logits of the request's last scheduled token.

    Random streams are keyed by (seed, sample index, position), so neither batching nor preemption changes them.
    `position` is the position the sampled token will have. `forbidden_token_ids` get probability zero (end tokens
    before `min_tokens`). `known_token_ids`, the prompt's `num_prompt_tokens` and the answer's, are set for a request
    with penalties only: its own array, to be read during the step, never kept or changed. A `witness` reports the two
    likeliest tokens at least, for a later comparison, whatever `params` ask for.
    """

    params: SamplingParams
    seed: int
    sample_indices: tuple[int, ...]
    position: int
    forbidden_token_ids: tuple[int, ...] = ()
    known_token_ids: "array[int] | None" = None
    num_prompt_tokens: int = 0
    witness: bool = False

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported beside the sampled one; None for no report."""
        asked = self.params.logprobs
        return max(2, asked or 0) if self.witness else asked


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Report on the prompt tokens `token_ids`, with the `count` likeliest beside each.

    `token_ids[i]` comes behind the request's scheduled token `first + i`, whose logits say how likely it was.
    """

    token_ids: "array[int]"
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's part of a step: tokens `[start, start + len(token_ids))` of what it knows.

    `block_tables[group_id]` maps logical block index to block id for paged groups (empty for the state group).
    It is the manager's own list: read it during the step, never keep or change it. `state` is None in a model
    without state layers.
    """

    request_id: str
    token_ids: "array[int]"
    start: int
    block_tables: tuple[Sequence[int], ...]
    state: StateStep | None
    sample: SampleSpec | None
    prompt_rows: PromptRows | None = None

    @property
    def end(self) -> int:
        """Tokens the request has computed once this step has returned."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything one worker step does, in this order: copies, loads begin, forward with exports, sample, saves begin.

    `connector_meta` is what the connector's scheduler side tells its worker side; a step may consist of it alone.
    """

    step_id: int
    requests: tuple[ScheduledRequest, ...]
    copies: tuple[BlockCopy, ...] = ()
    connector_meta: object | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens the forward computes."""
        return sum(len(request.token_ids) for request in self.requests)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one position: of the token that is there, then of the likeliest ones.

    The likeliest come best first and may hold the token itself once more. `rank` is how many tokens are at least as
    likely as it, itself included. `scale` is the largest absolute logit, which rounding errors are measured by.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int
    scale: float = field(default=0.0, compare=False)

    def likeliest(self, count: int) -> "TokenLogprobs":
        """The same report with at most the `count` likeliest tokens."""
        if len(self.token_ids) <= count + 1:
            return self
        return TokenLogprobs(self.token_ids[: count + 1], self.logprobs[: count + 1], self.rank, self.scale)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the worker answers: sampled ids per request (one per asked sample), and the tokens it really computed.

    `logprobs` has a row per sampled id of the requests that ask for them, from the logits before any sampling rule,
    and `prompt_logprobs` a row per token of `PromptRows`.
    """

    sampled: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    num_computed: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """Tokens `[first_token, boundary)` of a group, or its state at `boundary`, that a load did not restore."""

    load_id: int
    group_id: int
    first_token: int
    boundary: int


class Clock(Protocol):
    """Time as the engine sees it; the fake clock of tests advances only when told."""

    def now(self) -> float:
        """Return seconds since an arbitrary, fixed origin; never goes back."""
        ...
