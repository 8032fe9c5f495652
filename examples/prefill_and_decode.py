"""Prompts are computed by one engine and answered by another one, in processes that share nothing but a store.

    python examples/prefill_and_decode.py                                     a Mooncake of its own, a tiny model
    python examples/prefill_and_decode.py --store mooncake://HOST:PORT        a Mooncake that runs, and has memory
    python examples/prefill_and_decode.py --store FOLDER --model MODEL        a folder, a model

The producer computes each prompt and one token; with `do_remote_decode` its answer comes when the prompt is stored, and
says up to which token. The consumer resumes there. At last a third process computes everything without a cache, and the
answers are compared; the exit status is 1 if they differ.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dalsegno import LLM, SamplingParams
from dalsegno.errors import OptionError
from dalsegno.models.tiny import make_tiny_model
from dalsegno.store.mooncake import open_mooncake
from dalsegno.store.mooncake.master import MooncakeMaster

SHARED = "You are the pilot of a small ferry. You know the harbour, the tides and everybody on board. " * 60
QUESTIONS = ["How long is the crossing?", "May the dog come along?", "Why do we wait?"]
ROLES = ("kv_producer", "kv_consumer", None)


def answer(model: str, store: str, role: str | None, num_tokens: int) -> list[dict[str, Any]]:
    """One engine in a process of its own; without a role it caches nothing."""
    options: dict[str, Any] = (
        {"enable_prefix_caching": False} if role is None else {"kv_transfer_config": on(store, role)}
    )
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    found = []
    with LLM(model, kv_cache_memory_bytes=2**28, **options) as llm:
        for question in QUESTIONS:
            prompt: dict[str, Any] = {"prompt": SHARED + question}
            if role == "kv_producer":
                prompt["kv_transfer_params"] = {"do_remote_decode": True}
            begun = time.perf_counter()
            [output] = llm.generate([prompt], params, use_tqdm=False)
            found.append(
                {
                    "tokens": len(output.prompt_token_ids or ()),
                    "cached": output.num_cached_tokens,
                    "stored": (output.kv_transfer_params or {}).get("stored_boundary"),
                    "ms": 1000 * (time.perf_counter() - begun),
                    "answer": list(output.outputs[0].token_ids),
                }
            )
    return found


def on(store: str, role: str) -> dict[str, Any]:
    """The `kv_transfer_config` of an engine that has this role on a store."""
    settings: dict[str, Any] = {"store": "embedded", "path": store, "bytes": 2**28}
    if store.startswith("mooncake://"):
        settings = {"store": "mooncake", "master_server_address": store.removeprefix("mooncake://")}
    return {"kv_connector": "StoreConnector", "kv_role": role, "kv_connector_extra_config": settings}


@contextmanager
def own_mooncake() -> Iterator[str]:
    """A master, and memory that this process lends to it: `dalsegno store serve --with-master` in a few lines."""
    with MooncakeMaster() as master:
        lender = open_mooncake({"master_server_address": master.address, "global_segment_size": 2**28})
        try:
            yield f"mooncake://{master.address}"
        finally:
            lender.close()


def main() -> int:
    """Run the three processes one after the other and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--store", help="mooncake://HOST:PORT or a folder; default: a Mooncake of its own")
    parser.add_argument("--model", help="folder or name of a model; default: a tiny one is made")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or str(Path(folder) / "model")
        if given.model is None:
            make_tiny_model("qwen3-next", Path(model))
        if given.store is not None:
            return compare(model, given.store)
        try:
            with own_mooncake() as store:
                return compare(model, store)
        except OptionError as error:
            sys.exit(f"{error}\n(or give --store FOLDER)")


def compare(model: str, store: str) -> int:
    """Print what each process found; 1 if the consumer's answers are not the cold ones."""
    results = {}
    for role in ROLES:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            num_tokens = 1 if role == "kv_producer" else 16
            results[role] = process.submit(answer, model, store, role, num_tokens).result()
    print("prompt tokens  stored by the producer  found by the consumer  consumer ms  cold ms  same answer")
    same = True
    for produced, consumed, cold in zip(*(results[role] for role in ROLES), strict=True):
        equal = consumed["answer"] == cold["answer"]
        same = same and equal
        print(
            f"{cold['tokens']:13}  {produced['stored']:22}  {consumed['cached']:21}  {consumed['ms']:11.0f}  "
            f"{cold['ms']:7.0f}  {'yes' if equal else 'NO':>11}"
        )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
