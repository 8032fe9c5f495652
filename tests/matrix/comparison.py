"""Whether two runs gave the same answer, in the sense of rule R1."""

import numpy as np

from tests.matrix.backends import Row
from tests.matrix.workload import Answers

TOLERANCE = 1e-4


def differences(cold: Answers, run: Answers, prompt_lengths: dict[str, int]) -> tuple[list[str], int]:
    """Compare token by token; returns (what differs, tokens that differ where the cold run's best two were a tie)."""
    found, ties = [], 0
    for name, expected in cold.tokens.items():
        got = run.tokens.get(name)
        if got is None:
            found.append(f"{name}: no answer")
            continue
        length = prompt_lengths[name]
        first, ours = cold.logits.get(name, {}).get(length), run.logits.get(name, {}).get(length)
        if first is not None and ours is not None and not _close(first, ours):
            found.append(f"{name}: first logits differ by {np.abs(first - ours).max()}, hit {run.cached[name]}")
        at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b), None)
        if at is None:
            continue
        row = cold.logits.get(name, {}).get(length + at)
        if row is not None and _is_tie(row):
            ties += 1
        else:
            found.append(f"{name}: token {at} of {len(expected)} differs, hit {run.cached[name]}")
    return found, ties


def _bound(row: Row) -> float:
    return TOLERANCE * (1 + float(np.abs(row).max()))


def _close(left: Row, right: Row) -> bool:
    return bool(np.abs(left - right).max() <= _bound(left))


def _is_tie(row: Row) -> bool:
    best, second = np.sort(row)[-1:-3:-1]
    return bool(best - second < _bound(row))
