"""What offloading costs decode steps: a store on against off, thread against process, interleaved in one run.

Two loads on the tiny Qwen3-Next, eight requests decoding: alone, so that only what they leave behind is saved, and
beside prompts of 2,048 tokens that arrive one after the other and are stored while the others decode. Of the second
load the steps that compute a prompt are left out, and the median is over the steps right behind one, when its bytes
are on their way. Figures are medians over the repeats. The store is the embedded one, with `--mooncake 1` a Mooncake on
this host.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lender import lender
from rows import Row, command_line, parse_arguments, print_rows

from dalsegno import LLM, SamplingParams
from dalsegno.models.tiny import make_tiny_model

BATCH = 8
CONTEXT = 128
PREFILL = 2048
# Decode steps behind a prefill while which its bytes are stored, and from one prefill to the next.
STORING_STEPS = 8
PERIOD = 32
MODES: dict[str, dict[str, Any] | None] = {"off": None, "thread": {}, "process": {}}

DECODE, BESIDE = "decode step at batch 8", "decode step while a prefill of 2,048 tokens is stored"


class Engine:
    """An engine whose steps are timed."""

    def __init__(self, folder: Path, mode: str, store: dict[str, Any]) -> None:
        options: dict[str, Any] = {"max_num_batched_tokens": 8192, "kv_cache_memory_bytes": 2**30}
        if mode != "off":
            extra = {**store, "offload_worker": mode}
            options["kv_transfer_config"] = {"kv_connector": "StoreConnector", "kv_connector_extra_config": extra}
        self.llm = LLM(folder, **options)
        self._rng = random.Random(0)

    def prompt(self, length: int) -> list[int]:
        """Return fresh token ids."""
        return self._rng.choices(range(4096), k=length)

    def steps(self, num_steps: int, period: int | None) -> tuple[list[float], list[float]]:
        """Decode a full batch for `num_steps` steps, with a long prompt every `period` steps.

        Returns:
            Seconds of all steps that computed no prompt, and of those right behind one that did.
        """
        greedy = SamplingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True)
        first = SamplingParams(temperature=0.0, max_tokens=1)
        streams: list[Iterator[Any]] = [
            self.llm.stream([self.prompt(CONTEXT) for _ in range(BATCH)], greedy),
        ]
        next(streams[0])
        every: list[float] = []
        behind: list[float] = []
        core = self.llm.core
        since = PERIOD
        while core.has_unfinished_requests:
            if period is not None and since >= period:
                streams.append(self.llm.stream([self.prompt(PREFILL)], first))
                list(streams.pop())
                since = 0
            started = time.perf_counter()
            core.step()
            seconds = time.perf_counter() - started
            every.append(seconds)
            if since < STORING_STEPS:
                behind.append(seconds)
            since += 1
        streams[0].close()  # type: ignore[attr-defined]
        return every, behind


def main() -> None:
    """Measure every mode in turn and print."""
    arguments = parse_arguments(__doc__ or "", ("steps", 256), ("repeats", 5), ("threads", 0), ("mooncake", 0))
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    figures: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        folder = Path(directory) / "tiny"
        make_tiny_model("qwen3-next", folder)
        stores: dict[str, dict[str, Any]] = {mode: {"path": str(Path(directory) / mode)} for mode in MODES}
        if arguments.mooncake:
            settings = {"store": "mooncake", "master_server_address": stack.enter_context(lender(2**31))}
            stores = {mode: {**settings, "cache_prefix": mode} for mode in MODES}
        engines = {mode: Engine(folder, mode, stores[mode]) for mode in MODES}
        for engine in engines.values():
            stack.enter_context(engine.llm)
        for repeat in range(arguments.repeats + 1):
            for mode, engine in engines.items():
                alone, _ = engine.steps(arguments.steps, None)
                every, behind = engine.steps(arguments.steps, PERIOD)
                if repeat:
                    figures.setdefault((DECODE, mode), []).append((statistics.median(alone), _p99(alone)))
                    figures.setdefault((BESIDE, mode), []).append((statistics.median(behind), _p99(every)))
        stored = {mode: engine.llm.stats().get("kv_offload_store_bytes", 0) for mode, engine in engines.items()}
    assert all(stored[mode] for mode in MODES if mode != "off"), f"nothing was stored: {stored}"
    print_rows(_rows(figures), as_json=arguments.json)


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))]


def _rows(figures: dict[tuple[str, str], list[tuple[float, float]]]) -> list[Row]:
    rows = []
    for name in (DECODE, BESIDE):
        for index, what in enumerate(("median", "p99")):
            base = statistics.median(run[index] for run in figures[name, "off"])
            for mode in MODES:
                value = statistics.median(run[index] for run in figures[name, mode])
                label = "off" if mode == "off" else f"on, sender in a {mode}"
                reference, ratio = (None, None) if mode == "off" else (1e3 * base, value / base)
                rows.append(Row(f"{name}, {what}, store {label}", 1e3 * value, "ms", reference, ratio, command_line()))
    return rows


if __name__ == "__main__":
    main()
