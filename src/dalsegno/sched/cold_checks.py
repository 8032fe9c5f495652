"""Cold checks: a share of the requests that had a hit is computed again without one, and the two are compared.

A check computes the tokens of a finished request, prompt and answer, from the first one on. It finds nothing, publishes
nothing, and is neither waiting nor running as the scheduler's other requests are: one at a time gets what a step leaves
over, and gives its blocks back when a request has no room.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto, unique

from dalsegno.kv.manager import KVCacheManager
from dalsegno.request import FinishReason, Request
from dalsegno.sampling_params import SamplingParams
from dalsegno.types import ScheduledRequest, StepResult, TokenLogprobs

__all__ = ["ColdCheckSetup", "ColdChecks", "Mismatch", "Verdict", "compare_rows"]

_COUNTERS = (
    "prefix_cache_verified",
    "prefix_cache_mismatches",
    "prefix_cache_verify_ties",
    "prefix_cache_verify_dropped",
    "prefix_cache_verify_tokens",
    "prefix_cache_verify_evicted_blocks",
)
_NUM_WITNESSED = 8
_MAX_QUEUED = 64
_MAX_STARTS = 4
# A request that arrives meanwhile waits for the step, so its length is bounded also where there is budget.
_MAX_STEP_TOKENS = 128


@unique
class Verdict(Enum):
    """What the comparison of one position says."""

    SAME = auto()
    TIE = auto()
    MISMATCH = auto()


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A request whose hit did not give what a cold run gives.

    Attributes:
        request: the finished request, as it was served.
        position: the first token that differs; `[0, position)` are the tokens it was sampled behind.
        expected: of the cold run: the token, then the likeliest two.
        seen: the same, of the run with the hit.
        allowed: largest difference of two log-probabilities at this position.
        forgotten: (group, boundary, block) of what was unpublished.
    """

    request: Request
    position: int
    expected: TokenLogprobs
    seen: TokenLogprobs
    allowed: float
    forgotten: list[tuple[str, int, int]]


@dataclass(frozen=True, slots=True)
class ColdCheckSetup:
    """Which hits are checked and what counts as equal.

    Attributes:
        share: of the requests with a hit, in [0, 1].
        seed: the choice is a function of it and of the request's number.
        tolerance: two logits of one position may differ by this times (1 + the largest absolute logit).
        report: told of every mismatch.
    """

    share: float = 0.0
    seed: int = 0
    tolerance: float = 1e-4
    report: Callable[[Mismatch], None] = lambda mismatch: None


def compare_rows(cold: TokenLogprobs, seen: TokenLogprobs, tolerance: float) -> tuple[Verdict, float]:
    """Compare the same token, and the likeliest two of its position, in a cold run and in one with a hit.

    A log-probability is a logit less a mean of all of them, so two may differ by twice what two logits may. Another
    likeliest token is a tie where the cold run's best two are no further apart.

    Returns:
        the verdict, and the difference that was allowed.
    """
    allowed = 2 * tolerance * (1 + max(cold.scale, seen.scale))
    pairs = list(zip(cold.logprobs[:3], seen.logprobs[:3], strict=True))
    if not all(abs(left - right) <= allowed for left, right in pairs):
        return Verdict.MISMATCH, allowed
    if len(pairs) < 3 or cold.token_ids[1] == seen.token_ids[1]:
        return Verdict.SAME, allowed
    is_tie = cold.logprobs[1] - cold.logprobs[2] <= allowed
    return Verdict.TIE if is_tie else Verdict.MISMATCH, allowed


class ColdChecks:
    """Chooses requests, runs their checks one after the other and judges them. Used on the engine thread only."""

    def __init__(self, manager: KVCacheManager, setup: ColdCheckSetup) -> None:
        """Check hits on the blocks of `manager`."""
        self._manager = manager
        self._setup = setup
        self._queue: deque[Request] = deque()
        self._check: Request | None = None
        self._num_starts = 0
        self._num_checks = 0
        self.counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))

    @property
    def is_pending(self) -> bool:
        """Whether a check runs or waits."""
        return bool(self._queue)

    @property
    def holds_blocks(self) -> bool:
        """Whether a check has blocks."""
        return self._check is not None

    def is_running(self, request_id: str) -> bool:
        """Whether the check that has blocks is called so."""
        return self._check is not None and self._check.request_id == request_id

    def choose(self, request: Request, boundary: int) -> None:
        """The request is admitted with a hit of `boundary` tokens: have it witnessed if it is in the share."""
        if boundary and _draw(self._setup.seed, request) < self._setup.share:
            request.witness_until = request.num_tokens + _NUM_WITNESSED

    def enqueue(self, request: Request) -> None:
        """The request has ended: queue its check if it was chosen."""
        if not request.witness:
            return
        complete = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if complete and len(self._queue) < _MAX_QUEUED:
            self._queue.append(request)
        else:
            self.counters["prefix_cache_verify_dropped"] += 1

    def schedule(self, budget: int, *, alone: bool) -> dict[Request, int]:
        """Give the check its next tokens out of what a step has left; `alone` says that no request is there."""
        budget = min(budget, _MAX_STEP_TOKENS)
        while self._queue and budget > 0:
            check = self._check or self._make(self._queue[0])
            # Nothing is sampled, so the last token need not be computed.
            num_tokens = min(budget, check.num_tokens - 1 - check.num_computed_tokens)
            if self._allocate(check, num_tokens, alone=alone):
                self._check = check
                self._manager.grant_write(check)
                return {check: num_tokens}
            if self.give_way() or not alone:
                break
            # Nothing runs whose end would make room.
            self._drop()
        return {}

    def commit(self, part: ScheduledRequest, result: StepResult) -> None:
        """The step computed a part of the check; judge it when it is complete."""
        check = self._check
        assert check is not None, "a check is committed that does not run"
        self._manager.commit(check, len(part.token_ids))
        self.counters["prefix_cache_verify_tokens"] += len(part.token_ids)
        check.prompt_logprobs += result.prompt_logprobs.get(part.request_id, ())
        if check.awaits_prompt_logprobs:
            return
        self._release()
        self._num_starts = 0
        self._judge(self._queue.popleft(), check)

    def give_way(self) -> bool:
        """Take the check's blocks; it starts over later, a few times. Whether it had any."""
        if self._check is None:
            return False
        self._release()
        self._num_starts += 1
        if self._num_starts >= _MAX_STARTS:
            self._drop()
        return True

    def fail(self, request_ids: Collection[str]) -> None:
        """A step of these requests raised: a check among them is dropped."""
        if self._check is not None and self._check.request_id in request_ids:
            self._release()
            self._drop()

    def drop_all(self) -> None:
        """Nobody takes further steps."""
        if self._check is not None:
            self._release()
        while self._queue:
            self._drop()

    def _make(self, request: Request) -> Request:
        self._num_checks += 1
        first, last = request.witness[0][0], request.witness[-1][0]
        return Request(
            request_id=f"cold check {self._num_checks}",
            token_ids=request.token_ids[: last + 1],
            params=SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2),
            arrival_time=request.arrival_time,
            max_tokens=1,
            no_store=True,
            first_prompt_row=first - 1,
            background=True,
        )

    def _allocate(self, check: Request, num_tokens: int, *, alone: bool) -> bool:
        if check is self._check:
            return self._manager.allocate_slots(check, num_tokens) is not None
        computed, _, _ = self._manager.get_computed_blocks(check)
        packed = alone and not self._manager.requests
        room = check.num_tokens
        blocks = self._manager.allocate_slots(check, num_tokens, computed, room_for_tokens=room, packed=packed)
        return blocks is not None

    def _judge(self, request: Request, check: Request) -> None:
        self.counters["prefix_cache_verified"] += 1
        ties = 0
        for position, seen in request.witness:
            cold = check.prompt_logprobs[position - 1 - check.first_prompt_row]
            verdict, allowed = compare_rows(cold, seen, self._setup.tolerance)
            ties += verdict is Verdict.TIE
            if verdict is Verdict.MISMATCH:
                forgotten = self._manager.forget_chain(request)
                self.counters["prefix_cache_mismatches"] += 1
                self.counters["prefix_cache_verify_evicted_blocks"] += len(forgotten)
                self._setup.report(Mismatch(request, position, cold, seen, allowed, forgotten))
                break
        self.counters["prefix_cache_verify_ties"] += ties

    def _release(self) -> None:
        assert self._check is not None, "no check has blocks"
        self._manager.free(self._check)
        self._check = None

    def _drop(self) -> None:
        self._queue.popleft()
        self._num_starts = 0
        self.counters["prefix_cache_verify_dropped"] += 1


def _draw(seed: int, request: Request) -> float:
    """A number in [0, 1) that is the same whenever the same requests come again."""
    text = f"dalsegno cold check {seed} {request.order[1]} {request.sample_index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little") / 2**48
