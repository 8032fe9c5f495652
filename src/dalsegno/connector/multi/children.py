"""One side of a child of a MultiConnector: what raises there is counted and logged, and the others go on."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Generic, ParamSpec, TypeVar

from dalsegno.connector.base import SchedulerConnector, WorkerConnector

__all__ = ["Child", "merged_stats"]

logger = logging.getLogger(__name__)

_Side = TypeVar("_Side", bound=SchedulerConnector | WorkerConnector)
_Call = ParamSpec("_Call")
_Result = TypeVar("_Result")

_OF_ONE_CHILD = re.compile(r"kv_connector_\d+_")


class Child(Generic[_Side]):
    """The side of one child that lives here.

    Attributes:
        index: its place among the children.
        side: the child's own.
        num_errors: calls that raised.
        raised: whether the last call did.
    """

    def __init__(self, index: int, side: _Side) -> None:
        """Nothing has raised yet."""
        self.index = index
        self.side = side
        self.num_errors = 0
        self.raised = False
        self._logged: set[str] = set()

    def ask(
        self, default: _Result, call: Callable[_Call, _Result], *args: _Call.args, **kwargs: _Call.kwargs
    ) -> _Result:
        """Return what `call`, one of the side's, returns; `default` if it raises."""
        self.raised = False
        try:
            return call(*args, **kwargs)
        except Exception:
            self.raised = True
            self.num_errors += 1
            name = getattr(call, "__name__", str(call)).lstrip("_")
            # One traceback tells what is wrong; the counter tells how often.
            if name not in self._logged:
                self._logged.add(name)
                side = type(self.side).__name__
                logger.exception("child %d of a MultiConnector, %s: %s raised", self.index, side, name)
            return default


def _stats(side: SchedulerConnector | WorkerConnector) -> dict[str, int | float]:
    return dict(side.stats())


def merged_stats(children: Iterable[Child[_Side]], errors: str) -> dict[str, int | float]:
    """Counters of all children summed under their own names, and of each one under `kv_connector_N_` and the name.

    Args:
        children: the sides of this end.
        errors: name for the number of calls that raised, behind `kv_connector_`.
    """
    total: Counter[str] = Counter({f"kv_connector_{errors}": 0})
    by_child: dict[str, int | float] = {}
    for child in children:
        counters: dict[str, int | float] = child.ask({}, _stats, child.side)
        own = {f"kv_connector_{errors}": child.num_errors}
        total.update({name: value for name, value in counters.items() if not _OF_ONE_CHILD.match(name)})
        total.update(own)
        prefix = f"kv_connector_{child.index}_"
        by_child |= {prefix + name: value for name, value in counters.items()}
        by_child[prefix + errors] = child.num_errors
    return {**total, **by_child}
