"""R1 in a few cells of the switch matrix for every further hybrid family."""

import pytest

from tests.conftest import LONG
from tests.matrix.cells import pairwise
from tests.matrix.test_faults import TELLTALE, turns_red
from tests.matrix.test_switch_matrix import check
from tests.matrix.workload import Cell

FEW = [
    Cell(),
    Cell(budget=64, preempt_every=3),
    Cell(block_size=64, budget=64, pool="need"),
    Cell(caching=False, budget=64, preempt_every=3),
]
FAMILIES = (
    "granite-hybrid",
    "granite-hybrid-moe",
    "qwen3-5",
    "qwen3-5-moe",
    "bamba",
    "falcon-h1",
    "nemotron-h",
    "lfm2",
)


@pytest.mark.parametrize("cell", pairwise() if LONG else FEW, ids=str)
def test_granite_gives_the_cold_answer(cell: Cell) -> None:
    run, ties = check("granite-hybrid", cell)
    assert ties <= 1
    hits = sum(run.cached.values())
    assert hits == 0 if not cell.caching else hits > 0 or cell.pool != "large"


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_resumes_at_the_boundaries_the_workload_keeps(kind: str) -> None:
    run, ties = check(kind, Cell(budget=64))
    assert ties <= 1
    assert run.cached["resend"] == 96
    assert run.cached["extended by 1"] == 112
    assert run.cached["shared, third"] == 64
    assert run.cached["other salt"] == 0


@pytest.mark.parametrize("fault", ["chunk_end_state_under_boundary", "copy_skipped", "preempted_state_one_unit_off"])
def test_a_fault_turns_the_matrix_of_granite_red(fault: str) -> None:
    # Which cell meets the fault depends on what fits in its pool, so several are tried.
    cells = [TELLTALE[fault], Cell(budget=64, pool="double"), Cell(budget=64, pool="one more")]
    assert any(turns_red("granite-hybrid", fault, cell) for cell in cells), f"{fault} does not show"
