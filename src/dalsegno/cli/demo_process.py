"""One engine in a process of its own, for the demo: a job comes as JSON on stdin, the answers go as JSON to stdout."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dalsegno.errors import EngineError
from dalsegno.sampling_params import SamplingParams

__all__ = ["DemoAnswer", "DemoJob", "run_in_process"]


@dataclass(frozen=True, slots=True)
class DemoJob:
    """What the process does: make an engine, answer conversations one after the other, close it.

    Attributes:
        model: folder of the model.
        options: engine options.
        conversations: messages of each.
        tools: what all of them offer.
        max_tokens: tokens per answer.
    """

    model: str
    options: dict[str, Any]
    conversations: list[list[dict[str, Any]]]
    tools: list[dict[str, Any]] | None
    max_tokens: int


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """What came of one conversation; times in seconds, `by_tier` in tokens."""

    num_prompt_tokens: int
    by_tier: dict[str, int]
    token_ids: list[int]
    error: str | None
    time_to_first_token: float


def run_in_process(job: DemoJob) -> list[DemoAnswer]:
    """Run a job in a new process of this interpreter and return its answers.

    Raises:
        EngineError: the process failed; the message holds the end of what it wrote to stderr.
    """
    command = [sys.executable, "-m", __name__]
    ended = subprocess.run(command, input=json.dumps(asdict(job)), capture_output=True, text=True, check=False)
    if ended.returncode:
        raise EngineError(f"a process of the demo ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return [DemoAnswer(**answer) for answer in json.loads(ended.stdout)]


def _answer(job: DemoJob) -> Sequence[DemoAnswer]:
    from dalsegno.engine.llm import LLM

    params = SamplingParams(temperature=0, max_tokens=job.max_tokens)
    answers = []
    with LLM(Path(job.model), **job.options) as llm:
        # The first steps of a process are slow for reasons of their own; this leaves nothing behind to hit.
        llm.generate({"prompt": "warm-up " * 40, "cache_salt": "warm-up", "no_store": True}, params, use_tqdm=False)
        for messages in job.conversations:
            [output] = llm.chat(messages, params, use_tqdm=False, tools=job.tools)
            assert output.hit_report is not None, "a finished request has a report"
            answers.append(
                DemoAnswer(
                    len(output.prompt_token_ids),
                    output.hit_report.cached_by_tier,
                    list(output.outputs[0].token_ids),
                    output.outputs[0].error,
                    output.metrics.time_to_first_token or 0.0,
                )
            )
    return answers


if __name__ == "__main__":
    json.dump([asdict(answer) for answer in _answer(DemoJob(**json.load(sys.stdin)))], sys.stdout)
