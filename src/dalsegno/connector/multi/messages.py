"""What the two sides of a MultiConnector tell each other: what the children's sides do, each in its place."""

from dataclasses import dataclass

from dalsegno.connector.base import ConnectorOutput
from dalsegno.types import LoadFailure

__all__ = ["MultiMeta", "MultiReport"]


@dataclass(frozen=True, slots=True)
class MultiMeta:
    """What the worker sides begin with a step.

    Attributes:
        parts: for each child its own, None for nothing.
        refused: (child, all of a load) for each load that the child did not take; to be reported in its name.
    """

    parts: tuple[object | None, ...]
    refused: tuple[tuple[int, LoadFailure], ...] = ()


@dataclass(frozen=True, slots=True)
class MultiReport:
    """What one rank has to report.

    Attributes:
        parts: for each child what its worker side reports, None for nothing.
    """

    parts: tuple[ConnectorOutput | None, ...]
