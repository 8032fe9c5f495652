"""Engines in processes of their own: a job goes in as JSON on the command line, answers come back on stdout."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Answer", "answers", "start"]

_PROGRAM = """
import json, sys
from dalsegno import LLM, SamplingParams
model, options, prompts, transfer = json.loads(sys.stdin.read())
found = []
with LLM(model, kv_cache_memory_bytes=2**27, threads=1, **options) as llm:
    for ids, max_tokens in prompts:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        prompt = {"prompt_token_ids": ids, "kv_transfer_params": transfer}
        [output] = llm.generate([prompt], params, use_tqdm=False)
        answer = output.kv_transfer_params
        found.append([output.outputs[0].token_ids, output.num_cached_tokens, output.hit_report.cached_by_tier, answer])
    assert llm.core.wait_for_connector(60)
    llm.verify()
    found.append(llm.stats())
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Answer:
    """What came of one prompt."""

    token_ids: list[int]
    num_cached_tokens: int
    by_tier: dict[str, int]
    transfer: dict[str, Any] | None


def start(
    model: Path, prompts: list[tuple[list[int], int]], transfer: dict[str, Any] | None = None, **options: Any
) -> "subprocess.Popen[str]":
    """Start a process that answers prompts, each with its `max_tokens`, one after the other.

    `transfer` are the kv_transfer_params of all of them.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps([str(model), options, prompts, transfer]))
    process.stdin.close()
    return process


def answers(process: "subprocess.Popen[str]") -> tuple[list[Answer], dict[str, float]]:
    """Wait for a process to end well; return its answers and its engine's statistics."""
    assert process.stdout is not None
    printed = process.stdout.read()
    process.stdout.close()
    assert process.wait() == 0
    *found, stats = json.loads(printed)
    return [Answer(*answer) for answer in found], stats
