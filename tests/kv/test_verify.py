"""The self-check finds every count that is wrong."""

from collections.abc import Callable

import pytest

from dalsegno.config import CacheConfig
from dalsegno.kv.manager import KVCacheManager
from dalsegno.kv.runs import Run
from dalsegno.kv.verify import census
from dalsegno.testing.builders import make_layout
from dalsegno.types import BlockCopy, BlockHash
from tests.kv.driver import Driver

Fault = Callable[[KVCacheManager], object]

FAULTS: dict[str, Fault] = {
    "a reference too many": lambda m: m.pool.pin(0, m.requests["r"].tables[0][0]),
    "a reference too few": lambda m: m.pool.unpin(0, m.requests["r"].tables[0][0]),
    "a table that lost a block": lambda m: m.requests["r"].tables[0].pop(),
    "a state nobody owns": lambda m: setattr(m.requests["r"].state, "current", 0),
    "a copy nobody pinned": lambda m: m.copies_in_flight.append(("r", BlockCopy(0, 1, 2, 3))),
    "a hand-off nobody pinned": lambda m: m.pins.counts.update({(0, 1): 1}),
    "a miscounted slab": lambda m: setattr(m.pool, "reclaimable", m.pool.reclaimable + 1),
    "a miscounted open block": lambda m: m.pool.open.__setitem__(0, m.pool.open[0] - 1),
    "a slab bound to nobody": lambda m: m.pool.bound.__setitem__(m.pool.bound.index(0), -1),
    "a slab bound to another group": lambda m: m.pool.bound.__setitem__(m.pool.bound.index(1), 0),
    "a run under another hash": lambda m: m.index.tree.ends.update({BlockHash(b""): m.index.tree.ends.popitem()[1]}),
    "a child unknown to its parent": lambda m: next(run for run in m.index.tree if run.children).children.clear(),
    "a child of another parent": lambda m: setattr(run_of(m), "parent", Run(BlockHash(b""), None, 0, 2)),
    "a run out of step": lambda m: setattr(run_of(m), "start", 7),
    "a unit nobody counts": lambda m: setattr(m.index.tree, "num_units", m.index.num_units - 1),
    "a lost live child": lambda m: setattr(next(run for run in m.index.tree if run.children), "live_children", 9),
    "a wrong reach": lambda m: setattr(run_of(m), "reach", 1),
    "a block that vouches unknowingly": lambda m: run_of(m).blocks[0].__setitem__(0, 99),
    "a block that vouches for less than it says": lambda m: m.index.tree.deepest[0].__setitem__(
        run_of(m).blocks[0][-1], 1
    ),
    "a hole inside a block": lambda m: run_of(m).blocks[0].__setitem__(0, 0),
    "a unit without a block": lambda m: run_of(m).blocks[0].pop(),
}


def run_of(manager: KVCacheManager) -> Run:
    """A run with units."""
    return next(run for run in manager.index.tree if run.size > 1)


def busy() -> Driver:
    """A manager with a cached chain and a running request."""
    config = CacheConfig(block_size=32)
    case = Driver(make_layout("as", config, num_slabs=40), config)
    case.serve("old", range(100, 170), 20)
    request = case.new("r", range(70))
    assert case.admit(request)
    case.step({request: 70})
    return case


def test_a_sound_manager_passes() -> None:
    busy().manager.verify()


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_count_is_found(name: str) -> None:
    manager = busy().manager
    FAULTS[name](manager)
    with pytest.raises(AssertionError):
        manager.verify()


def test_a_census_finds_what_a_request_left_behind() -> None:
    case = busy()
    with pytest.raises(AssertionError, match="request entries left"):
        census(case.manager)
    for blocks in list(case.manager.requests.values()):
        case.manager.coordinator.release(blocks)
    case.manager.requests.clear()
    census(case.manager)
    block = next(iter(case.manager.index.published(0)))
    case.manager.pins.pin(0, block)
    with pytest.raises(AssertionError, match="references left"):
        census(case.manager)
