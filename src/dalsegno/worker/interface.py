"""What the engine core needs of a worker; the model worker and the fake worker of tests both answer to it."""

from collections.abc import Sequence
from typing import Protocol

from dalsegno.connector.port import ConnectorPort
from dalsegno.types import StepPlan, StepResult

__all__ = ["Worker"]


class Worker(Protocol):
    """Executes step plans; owns the device memory.

    Called on the engine thread only. The worker never keeps the lists of a plan beyond the call.
    """

    @property
    def port(self) -> ConnectorPort:
        """The connector's worker side, if there is one: what it reports, and how to wait for it."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: copies, forward with exports, sample; return when all its bytes are written.

        The connector's loads begin before the forward and its saves behind it, also when the step raises: what they
        name was written by earlier steps.

        Modifies the blocks the plan names as targets, write blocks, exports and token slots; nothing else. An
        exception means that nothing of the step counts; those blocks then hold undefined bytes.
        """
        ...

    def poison(self, group_id: int, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN; tests call it for every block that is freed or handed out."""
        ...

    def close(self) -> None:
        """Give the device memory back; the worker is not used again."""
        ...
