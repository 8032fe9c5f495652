"""A worker that computes nothing, for figures that are about scheduler and cache alone."""

import time
from collections.abc import Sequence

from dalsegno.connector.port import ConnectorPort
from dalsegno.types import StepPlan, StepResult

__all__ = ["NullWorker"]


class NullWorker:
    """Answers every plan with token 0 and touches no memory; `seconds` is the CPU time spent in it so far."""

    def __init__(self) -> None:
        """Start with no time spent."""
        self.seconds = 0.0
        self.port = ConnectorPort()

    def execute(self, plan: StepPlan) -> StepResult:
        """Return token 0 for each sample that is asked for."""
        started = time.thread_time()
        result = StepResult()
        for request in plan.requests:
            result.num_computed[request.request_id] = len(request.token_ids)
            if request.sample is not None:
                result.sampled[request.request_id] = [0] * len(request.sample.sample_indices)
        self.seconds += time.thread_time() - started
        return result

    def poison(self, group_id: int, block_ids: Sequence[int]) -> None:
        """Do nothing: there are no bytes."""

    def close(self) -> None:
        """Do nothing: there is no memory."""
