"""Cells of the switch matrix: a pairwise covering array of all switches, and random cells."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

from tests.matrix.stores import RANKS, STORES
from tests.matrix.workload import Cell

SWITCHES: dict[str, Sequence[Any]] = {
    "caching": (True, False),
    "budget": (512, 64, 23),
    "pool": ("large", "double", "one more", "need"),
    "preempt_every": (0, 3),
    "block_size": (16, 64, 48, 1024),
    "together": (True, False),
    "interval": (16, 32, 0),
    "store": ("none", *STORES),
}


RANKED = {**SWITCHES, "ranks": tuple(RANKS)}
"""With several ranks, which a model does not have."""


def pairwise(switches: dict[str, Sequence[Any]] = SWITCHES, seed: int = 0) -> list[Cell]:
    """The plain cell, and others such that every pair of values of two switches occurs in one; greedy, not minimal."""
    names = list(switches)
    pairs = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in switches[a] for y in switches[b]}
    rng = random.Random(seed)
    cells = [Cell()]
    pairs -= _covered(vars(cells[0]), names)
    while pairs:
        a, x, b, y = min(pairs, key=repr)
        candidates = []
        for _ in range(60):
            values = {name: rng.choice(list(switches[name])) for name in names} | {a: x, b: y}
            candidates.append((len(_covered(values, names) & pairs), values))
        values = max(candidates, key=lambda candidate: candidate[0])[1]
        pairs -= _covered(values, names)
        cells.append(Cell(**values))
    return cells


def random_cells(count: int, seed: int, switches: dict[str, Sequence[Any]] = SWITCHES) -> list[Cell]:
    """Cells drawn at random."""
    rng = random.Random(seed)
    return [Cell(**{name: rng.choice(list(values)) for name, values in switches.items()}) for _ in range(count)]


def _covered(values: dict[str, Any], names: Sequence[str]) -> set[tuple[str, Any, str, Any]]:
    return {(a, values[a], b, values[b]) for a, b in itertools.combinations(names, 2)}
