"""Why a prompt hit as far as it did, and why not further: every lost token has a reason."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, unique

__all__ = ["HitReport", "LostReason", "lost_tokens"]


@unique
class LostReason(Enum):
    """Why prompt tokens had to be computed; the values are what reports and metrics carry."""

    LAST_TOKEN = "last_token"
    SHORTER_THAN_UNIT = "shorter_than_unit"
    SUB_UNIT = "sub_unit"
    NEW = "new"
    DIVERGED = "diverged"
    NO_BOUNDARY_STATE = "no_boundary_state"
    EVICTED = "evicted"
    STORE_MISS = "store_miss"
    STORE_ERROR = "store_error"
    LOAD_FAILED = "load_failed"
    NO_ROOM = "no_room"
    CACHING_OFF = "caching_off"
    PROMPT_LOGPROBS = "prompt_logprobs"


@dataclass(slots=True)
class HitReport:
    """One prompt's hit: `boundary` plus all `lost` tokens is the prompt's length.

    Attributes:
        boundary: tokens resumed from the cache.
        boundary_by_group: the longest boundary each group could have restored alone.
        cached_by_tier: tokens by the tier they came from; they add up to `boundary`.
        lost: tokens by reason.
        checkpoints_skipped: boundary states that were planned and not kept for lack of room.
    """

    boundary: int = 0
    boundary_by_group: dict[str, int] = field(default_factory=dict)
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    checkpoints_skipped: int = 0

    def shorten(self, boundary: int, reason: LostReason) -> None:
        """Take the hit back to `boundary` and charge the difference to `reason`; modifies the report."""
        given_up = self.boundary - boundary
        assert given_up >= 0, f"a hit cannot grow from {self.boundary} to {boundary}"
        if given_up:
            self.lost[reason.value] = self.lost.get(reason.value, 0) + given_up
            self.boundary = boundary
            self.cached_by_tier = {"device": boundary} if boundary else {}

    def recharge(self, reasons: Sequence[LostReason], to: LostReason, tokens: int | None = None) -> None:
        """Charge up to `tokens` (None: all) of what was lost for `reasons`, in their order, to another reason."""
        for reason in reasons:
            there = self.lost.get(reason.value, 0)
            moved = there if tokens is None else min(there, tokens)
            if not moved:
                continue
            self.lost[reason.value] = there - moved
            if there == moved:
                del self.lost[reason.value]
            self.lost[to.value] = self.lost.get(to.value, 0) + moved
            if tokens is not None:
                tokens -= moved


def lost_tokens(
    num_tokens: int, hash_block_size: int, boundary: int, covered: int, inside: LostReason, beyond: LostReason
) -> dict[str, int]:
    """Account for every prompt token after `boundary`.

    Half-open ranges, with limit = the largest boundary a prompt of this length can resume at:
    `[boundary, covered)` had its attention cached and is charged to `inside`, `[covered, limit)` to `beyond`, and
    `[limit, num_tokens)` could not be resumed by any prompt of this length.
    """
    limit = (num_tokens - 1) // hash_block_size * hash_block_size
    covered = max(boundary, min(covered, limit))
    if limit == 0:
        tail = LostReason.SHORTER_THAN_UNIT
    else:
        tail = LostReason.SUB_UNIT if num_tokens % hash_block_size else LostReason.LAST_TOKEN
    lost: dict[str, int] = {}
    for reason, tokens in ((inside, covered - boundary), (beyond, limit - covered), (tail, num_tokens - limit)):
        if tokens:
            lost[reason.value] = lost.get(reason.value, 0) + tokens
    return lost
