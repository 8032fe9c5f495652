"""The frame of the ops with a state: decode steps in runs of any size, and when requests may be run one by one."""

import pytest

from dalsegno.ops import recurrence
from dalsegno.ops.batch import StateBatch
from tests.ops.memory import SlabMemory
from tests.ops.state_steps import SCAN_SHAPES, SHAPES, DeltaInputs, ScanInputs, check_against_reference, seed_blocks

pytestmark = pytest.mark.usefixtures("either_form")


@pytest.mark.parametrize("num_bytes", [1, 2000, 1 << 20])
@pytest.mark.parametrize("num_requests", [1, 7])
@pytest.mark.parametrize("rule", [DeltaInputs, ScanInputs])
def test_a_decode_step_in_runs_of_any_size_matches_the_reference(
    rule: type[DeltaInputs] | type[ScanInputs], num_requests: int, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrence, "_CACHED_BYTES", num_bytes)
    memory = SlabMemory(SHAPES if rule is DeltaInputs else SCAN_SHAPES, 1 + 2 * num_requests, 1)
    seed_blocks(memory, range(1, num_requests + 1))
    # Some go on in place, some from a block that stays, one from nothing.
    read = [0, *range(2, num_requests + 1)]
    write = [block if block % 2 else num_requests + block for block in range(1, num_requests + 1)]
    batch = StateBatch.build(range(num_requests + 1), read, write)
    assert batch.rows_are_apart
    check_against_reference(rule.random(num_requests), memory, batch)


def test_requests_that_read_what_another_writes_are_not_apart() -> None:
    assert StateBatch.build([0, 1, 2], [1, 1], [2, 3]).rows_are_apart
    assert not StateBatch.build([0, 1, 2], [1, 1], [1, 3]).rows_are_apart
    assert not StateBatch.build([0, 1], [1], [1], [(0, 1, 2)]).rows_are_apart
