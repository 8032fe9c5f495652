"""Hits on recorded tau-bench dialogues, beside what a cache that never forgets could give.

Every answer of every dialogue is asked for in turn on the tiny Qwen3-Next, with the tools offered and the recorded
answers in the next prompt. Needs the folder of traces that DALSEGNO_TRACES names, and says so and does nothing without.
`--model 0` counts with a worker that computes nothing, which changes no hit, and compares no answers.
"""

import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from null_worker import NullWorker
from replay import Served, compare_with_cold, infinite_cache_bound, load_dialogues, replay
from rows import Row, command_line, parse_arguments, print_rows

from dalsegno import LLM, SamplingParams
from dalsegno.cli.conversations import TRACES_VARIABLE
from dalsegno.models.tiny import make_tiny_model

_BYTES_PER_DIALOGUE = 96 << 20
_PARAMS = SamplingParams(temperature=0.0, max_tokens=1)


def main() -> None:
    """Replay, check and print; status 1 when a sampled answer is not that of a cold run."""
    arguments = parse_arguments(__doc__ or "", ("dialogues", 20), ("samples", 10), ("model", 1))
    folder = os.environ.get(TRACES_VARIABLE)
    if not folder:
        print(
            f"SKIPPED: {TRACES_VARIABLE} names no folder of recorded dialogues; nothing was measured", file=sys.stderr
        )
        return
    dialogues = load_dialogues(Path(folder), arguments.dialogues)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "tiny"
        make_tiny_model("qwen3-next", model)
        with LLM(model, kv_cache_memory_bytes=(1 << 30) + _BYTES_PER_DIALOGUE * len(dialogues)) as llm:
            if not arguments.model:
                llm.core.worker.close()
                llm.core.worker = NullWorker()
            unit = llm.options.hash_block_size
            started = time.perf_counter()
            served = list(replay(llm, dialogues, _PARAMS))
            seconds = time.perf_counter() - started
            evicted = llm.stats()["num_evicted_blocks"]
        assert not evicted, f"memory was not ample: {evicted} blocks were evicted"
        with LLM(model, kv_cache_memory_bytes=1 << 28, enable_prefix_caching=False) as cold:
            agreement = compare_with_cold(cold, served, arguments.samples, _PARAMS)
    bounds = infinite_cache_bound([request.token_ids for request in served], unit)
    _explain(served, bounds)
    cached, bound = sum(request.cached for request in served), sum(bounds)
    total = sum(len(request.token_ids) for request in served)
    what = f"tau-bench, {len(dialogues)} dialogues, {len(served)} requests"
    command = command_line()
    compared = float(agreement.compared)
    rows = [
        Row(f"{what}: cached tokens", float(cached), "tokens", float(bound), cached / bound, command),
        Row(f"{what}: hit rate", 100 * cached / total, "%", 100 * bound / total, cached / bound, command),
        Row(f"{what}: time", seconds, "s", None, None, command),
    ]
    if agreement.compared:
        agreed = compared - len(agreement.broken)
        rows += [
            Row(f"{what}: answers of a cold run", agreed, "requests", compared, agreed / compared, command),
            Row(f"{what}: largest logit difference", agreement.largest, "R1 bounds", 1.0, agreement.largest, command),
        ]
    print_rows(rows, as_json=arguments.json)
    for line in agreement.broken:
        print(f"NOT THE COLD ANSWER: {line}", file=sys.stderr)
    if agreement.broken:
        sys.exit(1)


def _explain(served: list[Served], bounds: list[int]) -> None:
    """Say on stderr where tokens below the bound went: by the reason the engine gives, and the largest losses."""
    missed = [
        (bound - request.cached, index) for index, (request, bound) in enumerate(zip(served, bounds, strict=True))
    ]
    reasons: Counter[str] = Counter()
    for missing, index in missed:
        if missing > 0:
            reasons[max(served[index].lost, key=served[index].lost.__getitem__)] += missing
    print(f"below the bound: {sum(m for m, _ in missed if m > 0)} tokens {dict(reasons)}", file=sys.stderr)
    for missing, index in sorted(missed, reverse=True)[:8]:
        if missing > 0:
            request = served[index]
            print(
                f"  {missing} tokens: request {index} of {request.dialogue}, prompt {len(request.token_ids)}, bound "
                f"{bounds[index]}, cached {request.cached}, lost {request.lost}",
                file=sys.stderr,
            )


if __name__ == "__main__":
    main()
