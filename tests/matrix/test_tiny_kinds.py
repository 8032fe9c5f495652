"""R1 for every kind of tiny model: boundaries of the workload, and a few cells that meet every switch."""

import pytest

from dalsegno.models.tiny import TINY_KINDS
from tests.conftest import LONG
from tests.matrix.test_switch_matrix import FAMILIES, check
from tests.matrix.workload import Cell

FEW = [
    Cell(budget=23, pool="need", preempt_every=3, block_size=48, interval=32),
    Cell(budget=64, pool="one more", block_size=64, interval=0),
    Cell(pool="double", preempt_every=3, block_size=1024, together=False),
    Cell(caching=False, budget=64, preempt_every=3),
]


@pytest.mark.parametrize("seed", range(3 if LONG else 1))
@pytest.mark.parametrize("kind", TINY_KINDS)
def test_every_kind_resumes_at_the_boundaries_the_workload_keeps(kind: str, seed: int) -> None:
    run, ties = check(kind, Cell(budget=64), seed)
    assert ties <= 1
    assert run.cached["resend"] == 96
    assert run.cached["extended by 1"] == 112
    assert run.cached["shared, third"] == 64
    assert run.cached["other salt"] == 0


@pytest.mark.parametrize("kind", sorted(set(TINY_KINDS) - set(FAMILIES)))
def test_every_kind_gives_the_cold_answer_whatever_the_switches(kind: str) -> None:
    ties = 0
    for cell in FEW:
        run, more = check(kind, cell)
        ties += more
        assert bool(sum(run.cached.values())) == cell.caching
        assert not cell.preempt_every or run.preemptions or not cell.together
    assert ties <= 1
