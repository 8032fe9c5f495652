"""A conversation of 2,000 tokens resumed by another process, through a store, beside a cold run there.

The store is the embedded one, with `--mooncake 1` a Mooncake on this host whose memory another process lends.
Each round has two processes: the first computes the prompt and ends; the second answers a prompt nobody knows and then
the same prompt with 20 tokens more, each with its time to first token. Figures are medians over the rounds.
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from lender import lender
from rows import Row, command_line, parse_arguments, print_rows

from dalsegno import LLM, SamplingParams
from dalsegno.kv.layout import MemoryLayout
from dalsegno.models.tiny import make_tiny_model

TOKENS = 2_000
MORE = 20
CHILD = "--child"


def child(folder: str, store: str, seed: int, *, resumes: bool) -> dict[str, Any]:
    """Be one of the processes of round `seed`; the second one `resumes`."""
    rng = random.Random(seed)
    prompt, fresh, more = (rng.choices(range(4096), k=count) for count in (TOKENS, TOKENS + MORE, MORE))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    def send(llm: LLM, ids: list[int], **fields: Any) -> Any:
        [output] = llm.generate([{"prompt_token_ids": ids, **fields}], params, use_tqdm=False)
        return output

    with LLM(folder, kv_store=store, kv_cache_memory_bytes=2**28) as llm:
        if not resumes:
            send(llm, prompt)
            # What it would have hit itself, had it gone on.
            again = send(llm, [*prompt, *more])
            return {"hit": again.num_cached_tokens, "answer": list(again.outputs[0].token_ids)}
        send(llm, rng.choices(range(4096), k=TOKENS), cache_salt="warm-up", no_store=True)
        cold = send(llm, fresh, no_store=True)
        before = llm.stats()["kv_offload_load_bytes"]
        warm = send(llm, [*prompt, *more])
        return {
            "hit": warm.num_cached_tokens,
            "answer": list(warm.outputs[0].token_ids),
            "cold": cold.metrics.time_to_first_token,
            "warm": warm.metrics.time_to_first_token,
            "bytes": llm.stats()["kv_offload_load_bytes"] - before,
            "least_bytes": bytes_of(llm.core.layout, warm.num_cached_tokens),
        }


def bytes_of(layout: MemoryLayout, num_tokens: int) -> int:
    """Bytes of the attention of so many tokens and of one state, without padding."""
    parts = [(group, part) for group in layout.groups for layer in group.layers for part in layer.parts]
    return sum(4 * prod(part.shape) * (1 if group.is_state else num_tokens) for group, part in parts)


@contextmanager
def stores(directory: Path, *, mooncake: bool) -> Iterator[Callable[[int], str]]:
    """Give the `kv_store` of each round."""
    if not mooncake:
        yield lambda seed: str(directory / f"store-{seed}")
        return
    with lender(2**28) as address:
        yield lambda seed: f"mooncake://{address}"


def run_child(folder: Path, store: str, seed: int, *, resumes: bool) -> dict[str, Any]:
    """Run `child` in a process of its own."""
    command = [sys.executable, __file__, CHILD, json.dumps([str(folder), store, seed, resumes])]
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def main() -> None:
    """Run every round and print."""
    arguments = parse_arguments(__doc__ or "", ("rounds", 5), ("mooncake", 0))
    rounds = []
    with (
        tempfile.TemporaryDirectory() as directory,
        stores(Path(directory), mooncake=bool(arguments.mooncake)) as store_of,
    ):
        folder = Path(directory) / "tiny"
        make_tiny_model("qwen3-next", folder)
        for seed in range(arguments.rounds):
            store = store_of(seed)
            first = run_child(folder, store, seed, resumes=False)
            second = run_child(folder, store, seed, resumes=True)
            assert second["hit"] >= first["hit"], f"the hit was {first['hit']} tokens and is {second['hit']}"
            assert second["answer"] == first["answer"], "the answers differ"
            assert second["bytes"] >= second["least_bytes"], f"{second['bytes']} bytes read of {second['least_bytes']}"
            rounds.append(second)
    cold, warm = (statistics.median(found[name] for found in rounds) for name in ("cold", "warm"))
    rows = [
        Row("first token of 2,020 tokens, cold", 1e3 * cold, "ms", None, None, command_line()),
        Row("the same resumed by another process", 1e3 * warm, "ms", 1e3 * cold, warm / cold, command_line()),
        Row("tokens resumed", rounds[0]["hit"], "tokens", None, None, command_line()),
        Row("bytes read from the store", min(found["bytes"] for found in rounds), "bytes", None, None, command_line()),
    ]
    print_rows(rows, as_json=arguments.json)


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        model, path, number, second_process = json.loads(sys.argv[2])
        print(json.dumps(child(model, path, number, resumes=second_process)))
    else:
        main()
