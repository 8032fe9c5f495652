"""The checks can fail: every planted fault turns the switch matrix red."""

import pytest

from dalsegno.testing.faults import FAULTS, plant
from dalsegno.types import GroupKind
from tests.conftest import LONG
from tests.matrix.cells import pairwise
from tests.matrix.comparison import differences
from tests.matrix.test_switch_matrix import FAMILIES, backend_of, prompt_lengths, reference
from tests.matrix.tiny_models import tiny_kinds_with
from tests.matrix.workload import Cell, run_cell

TELLTALE: dict[str, Cell] = {
    "chunk_end_state_under_boundary": Cell(pool="need", budget=64),
    "copy_skipped": Cell(block_size=64),
    "preempted_state_one_unit_off": Cell(preempt_every=3, budget=64),
    "shared_tail_written": Cell(block_size=64),
    "source_freed_early": Cell(block_size=64),
}
"""The cell each fault shows in, where the default one does not do."""

KINDS = {"window_left_early": "aws"}


def turns_red(name: str, fault: str, cell: Cell) -> str | None:
    """What goes wrong in a cell with a fault; None if nothing does."""
    phases, cold = reference(name)
    try:
        run = run_cell(backend_of(name), cell, phases, lambda core: plant(core, fault))
    except AssertionError as error:
        return f"{type(error).__name__}: {error}"
    found, _ = differences(cold, run, prompt_lengths(phases))
    if run.cached["other salt"]:
        found.append("a hit across salts")
    return "; ".join(found) or None


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_turns_the_matrix_of_integers_red(fault: str) -> None:
    name = f"fake-{KINDS.get(fault, 'as')}"
    red = [cell for cell in pairwise() if cell.caching and turns_red(name, fault, cell)]
    assert red, f"{fault} shows in no cell"


@pytest.mark.parametrize("fault", sorted(set(FAULTS) - {"window_left_early"}))
@pytest.mark.parametrize("kind", tiny_kinds_with(GroupKind.STATE) if LONG else FAMILIES)
def test_a_fault_turns_the_matrix_of_a_model_red(kind: str, fault: str) -> None:
    # Whether a cell meets a fault depends on what fits in its pool; the likeliest one comes first.
    cells = [TELLTALE.get(fault, Cell()), Cell(budget=64, pool="double"), Cell(budget=64, pool="one more")]
    assert any(turns_red(kind, fault, cell) for cell in cells), f"{fault} does not show"
    if LONG:
        assert any(turns_red(kind, fault, cell) for cell in pairwise() if cell.caching), f"{fault} needs its cell"


@pytest.mark.parametrize("kind", tiny_kinds_with(GroupKind.WINDOW))
def test_a_window_left_early_turns_the_matrix_of_a_model_red(kind: str) -> None:
    assert turns_red(kind, "window_left_early", Cell())


def test_without_a_fault_the_same_check_is_green() -> None:
    phases, cold = reference("fake-as")
    run = run_cell(backend_of("fake-as"), Cell(block_size=64), phases)
    assert differences(cold, run, prompt_lengths(phases)) == ([], 0)
