"""R1 under every mix of switches: the answer is that of a run with the cache off, alone, in one chunk."""

import functools
from collections import Counter
from pathlib import Path

import pytest

from dalsegno.models.tiny import TINY_KINDS
from dalsegno.store.mooncake import MooncakeStore
from dalsegno.testing.fake_mooncake import FakeMooncakeMaster
from dalsegno.testing.faulty_mooncake import UnluckyMooncakeClient
from tests.conftest import LONG
from tests.matrix.backends import Backend, fake_backend, model_backend
from tests.matrix.cells import RANKED, pairwise, random_cells
from tests.matrix.comparison import differences
from tests.matrix.stores import STORES
from tests.matrix.tiny_models import tiny_model
from tests.matrix.workload import Answers, Cell, Prompt, build_phases, run_cell

COLD = Cell(caching=False, together=False)

FAMILIES = ("qwen3-next", "granite-hybrid")
"""Kinds of tiny model that meet the whole matrix in every run: one of each recurrence."""


@functools.cache
def backend_of(name: str) -> Backend:
    return fake_backend(name.removeprefix("fake-")) if name.startswith("fake-") else model_backend(tiny_model(name))


@functools.cache
def reference(name: str, seed: int = 0) -> tuple[list[list[Prompt]], Answers]:
    """Phases of the workload, and every prompt answered cold."""
    backend = backend_of(name)

    def cold(prompt: Prompt) -> list[int]:
        return run_cell(backend, COLD, [[prompt]]).tokens[prompt.name]

    phases = build_phases(backend, cold, seed)
    return phases, run_cell(backend, COLD, phases)


def check(name: str, cell: Cell, seed: int = 0) -> tuple[Answers, int]:
    phases, cold = reference(name, seed)
    run = run_cell(backend_of(name), cell, phases)
    found, ties = differences(cold, run, prompt_lengths(phases))
    assert not found, f"{cell}: {found}"
    return run, ties


def prompt_lengths(phases: list[list[Prompt]]) -> dict[str, int]:
    lengths = {}
    for phase in phases:
        for prompt in phase:
            lengths[prompt.name] = len(prompt.token_ids)
            lengths |= {f"{prompt.name} #{i}": len(prompt.token_ids) for i in range(1, prompt.samples)}
    return lengths


@pytest.mark.parametrize("kinds", ["as", "a", "w", "aw", "s", "aws", "ws", "aas"])
def test_integers_give_the_cold_answer_in_every_cell(kinds: str) -> None:
    cells = [*pairwise(RANKED), *random_cells(300 if LONG else 20, len(kinds), RANKED)]
    for cell in cells:
        check(f"fake-{kinds}", cell)


def test_the_pairwise_cells_cover_every_pair_of_values() -> None:
    cells = pairwise(RANKED)
    for a, xs in RANKED.items():
        for b, ys in RANKED.items():
            if a < b:
                seen = {(getattr(cell, a), getattr(cell, b)) for cell in cells}
                assert seen == {(x, y) for x in xs for y in ys}


@pytest.mark.parametrize("cell", pairwise(), ids=str)
@pytest.mark.parametrize("kind", TINY_KINDS if LONG else FAMILIES)
def test_a_model_gives_the_cold_answer_in_every_cell(kind: str, cell: Cell) -> None:
    run, ties = check(kind, cell)
    assert ties <= 1
    hits = sum(run.cached.values())
    assert hits == 0 if not cell.caching else hits > 0 or cell.pool != "large" or "faulty" in cell.store


def test_the_faulty_mooncake_meets_every_misfortune(monkeypatch: pytest.MonkeyPatch) -> None:
    clients: list[UnluckyMooncakeClient] = []

    def made(_: Path) -> MooncakeStore:
        clients.append(UnluckyMooncakeClient(FakeMooncakeMaster(), 2**28, 0.1, len(clients)))
        return MooncakeStore(clients[-1], probe_interval_s=0.001)

    monkeypatch.setitem(STORES, "mooncake, faulty", made)
    for number in range(60):
        check("fake-as", Cell(store="mooncake, faulty", together=bool(number % 2)))
        met = Counter(name for client in clients for name in client.met)
        if len(met) == 9:
            return
    raise AssertionError(f"only {met}")


def test_the_workload_hits_and_preempts() -> None:
    """The matrix means something only if its switches bite."""
    run, _ = check("fake-as", Cell())
    assert run.cached["resend"] == 96
    assert run.cached["extended by 1"] == 112
    assert run.cached["shared, third"] == 64
    assert run.cached["other salt"] == 0
    hits = sum(run.cached.values())
    for store in ("memory", "embedded", "mooncake"):
        assert check("fake-as", Cell(store=store))[0].cached == run.cached
    for ranks in ("2", "4"):
        assert check("fake-as", Cell(store="mooncake", ranks=ranks))[0].cached == run.cached
    for ranks in ("2, keys missing", "4, one dead"):
        assert 0 <= sum(check("fake-as", Cell(store="mooncake", ranks=ranks))[0].cached.values()) < hits
    assert check("fake-as", Cell(preempt_every=3))[0].preemptions > 5
    assert check("fake-as", Cell(pool="need"))[0].preemptions > 0
