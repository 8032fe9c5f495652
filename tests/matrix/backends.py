"""What the switch matrix runs on: the integers of the fake worker, or a real tiny model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dalsegno.connector.base import WorkerConnector
from dalsegno.kv.layout import MemoryLayout
from dalsegno.testing.fake_worker import FakeClock, FakeWorker
from dalsegno.types import CachePart, Clock, GroupKind, LayerCacheSpec
from dalsegno.worker.interface import Worker

Row = npt.NDArray[np.float32]
"""Logits of one position, `[vocab]`."""

Logits = dict[str, dict[int, Row]]
"""By request id and position."""


@dataclass(frozen=True)
class Backend:
    """A way to execute plans.

    Attributes:
        specs: what its layers keep.
        sample_stride: 1 if samples of one greedy prompt differ by design (the fake worker), 0 if they are equal.
    """

    name: str
    specs: list[LayerCacheSpec]
    vocab_size: int
    clock: Clock
    sample_stride: int
    worker: Callable[[MemoryLayout, Logits, Sequence[WorkerConnector], Mapping[int, int]], Worker]


def fake_backend(kinds: str) -> Backend:
    """The fake worker over layers given by letters: a(ttention), w(indow of 40), s(tate)."""
    names = {"a": GroupKind.ATTENTION, "w": GroupKind.WINDOW, "s": GroupKind.STATE}
    parts = {
        "a": (CachePart("key", (1, 4), "float32"), CachePart("value", (1, 4), "float32")),
        "w": (CachePart("key", (1, 4), "float32"),),
        "s": (CachePart("recurrent", (1, 128, 4), "float32"),),
    }
    specs = [
        LayerCacheSpec(i, names[kind], parts[kind], window=40 if kind == "w" else None) for i, kind in enumerate(kinds)
    ]
    clock = FakeClock()
    return Backend(
        f"fake-{kinds}",
        specs,
        997,
        clock,
        1,
        lambda layout, logits, connectors, put_step: FakeWorker(
            layout, clock, connectors=connectors, put_step=put_step
        ),
    )


def model_backend(directory: Path) -> Backend:
    """The real worker on a tiny model, float32 on the CPU; logits are recorded."""
    import torch

    from dalsegno.models.registry import load_model
    from dalsegno.worker.model_worker import ModelWorker

    model = load_model(directory, torch.float32, torch.device("cpu"))

    def worker(
        layout: MemoryLayout, logits: Logits, connectors: Sequence[WorkerConnector], put_step: Mapping[int, int]
    ) -> Worker:
        assert len(connectors) <= 1, "a model has one rank"
        made = ModelWorker(model, layout, torch.device("cpu"), *connectors)

        def observe(request_id: str, position: int, row: Any) -> None:
            logits.setdefault(request_id, {})[position] = row.float().numpy().copy()

        made.logits_observer = observe
        return made

    return Backend(directory.name, model.cache_specs(), model.vocab_size, FakeClock(), 0, worker)
