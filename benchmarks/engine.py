"""Prefill, resend and decode on the tiny Qwen3-Next, beside transformers in the same process and other engines.

We run with native kernels and with torch alone; all sides run float32 with the same number of threads, in turn. Each
figure is the best of its repeats, since what else runs on the machine only adds. The figures of vLLM and llama.cpp were
measured once, on two cores. `--context` is the prompt's length where decode steps are measured; `--bfloat16 1` is our
dtype, for which there are no native kernels.
"""

import copy
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rows import Row, command_line, parse_arguments, print_rows
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList, logging

from dalsegno import LLM, SamplingParams
from dalsegno.engine.outputs import RequestOutput
from dalsegno.models.tiny import make_tiny_model

NEW_TOKENS = 64
BATCHES = (1, 8, 32)
DTYPES = ("float32", "bfloat16")
NATIVE, TORCH, THEIRS = "native", "torch alone", "transformers"

PREFILL, RESEND = "prefill {tokens} tokens", "the same prompt and 64 new tokens"
DECODE = "decode step at batch {batch}"
# Seconds of vLLM's CPU build (0.32, bf16, eager) and of llama.cpp (f32, two threads), each on two cores.
OTHERS: dict[str, dict[str, float]] = {
    "vLLM": {PREFILL: 4.8, RESEND: 0.44, DECODE.format(batch=1): 0.033, DECODE.format(batch=8): 0.075},
    "llama.cpp": {PREFILL: 0.72, RESEND: 0.032, DECODE.format(batch=1): 0.0025},
}


class Prompts:
    """Fresh prompts of random tokens."""

    def __init__(self, vocab_size: int) -> None:
        self._rng = random.Random(0)
        self._vocab_size = vocab_size

    def fresh(self, count: int) -> list[int]:
        """Return `count` token ids."""
        return self._rng.choices(range(self._vocab_size), k=count)


def measure_ours(llm: LLM, prompts: Prompts, tokens: int, context: int, steps: int) -> dict[str, float]:
    """Measure everything once; seconds by name."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    prompt = prompts.fresh(tokens)

    def first_token(ids: list[int]) -> tuple[float, int]:
        [result] = llm.generate([ids], params, use_tqdm=False)
        seconds = result.metrics.time_to_first_token
        assert seconds is not None, "a finished request has a first token"
        return seconds, result.num_cached_tokens or 0

    cold, cached = first_token(prompt)
    assert cached == 0, "a fresh prompt has a hit"
    resend, cached = first_token(prompt + prompts.fresh(NEW_TOKENS))
    assert cached >= (tokens - 1) // 16 * 16, f"only {cached} tokens of the resend were cached"
    seconds = {PREFILL: cold, RESEND: resend}
    for batch in BATCHES:
        longer = SamplingParams(temperature=0.0, max_tokens=steps + 1, ignore_eos=True)
        results = llm.generate([prompts.fresh(context) for _ in range(batch)], longer, use_tqdm=False)
        seconds[DECODE.format(batch=batch)] = _decode_seconds(results, steps)
    return seconds


def _decode_seconds(results: list[RequestOutput], steps: int) -> float:
    """Seconds per step from the last first token to the last of all, when all requests were decoding together."""
    starts = [result.metrics.first_token_time for result in results]
    ends = [result.metrics.finish_time for result in results]
    assert len(set(starts)) == len(set(ends)) == 1, "the requests were not decoded in the same steps"
    assert starts[0] is not None
    assert ends[0] is not None
    return (ends[0] - starts[0]) / steps


@torch.inference_mode()
def measure_theirs(model: Any, prompts: Prompts, tokens: int, context: int, steps: int) -> dict[str, float]:
    """Measure transformers at the same; the resend goes on from the cache of the prompt's own prefill."""
    prompt = torch.tensor([prompts.fresh(tokens)])
    note_time = _NoteTime()

    def generate(ids: torch.Tensor, new: int, **options: Any) -> Any:
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            use_cache=True,
            return_dict_in_generate=True,
            stopping_criteria=StoppingCriteriaList([note_time]),
            **options,
        )

    cold, result = _timed(lambda: generate(prompt, 1))
    cache = copy.deepcopy(result.past_key_values)
    longer = torch.cat([prompt, torch.tensor([prompts.fresh(NEW_TOKENS)])], dim=1)
    resend, _ = _timed(lambda: generate(longer, 1, cache=cache))
    seconds = {PREFILL: cold, RESEND: resend}
    for batch in BATCHES:
        ids = torch.tensor([prompts.fresh(context) for _ in range(batch)])
        note_time.times.clear()
        generate(ids, 1 + steps)
        assert len(note_time.times) == 1 + steps, "transformers did not decode as many tokens as were asked for"
        seconds[DECODE.format(batch=batch)] = (note_time.times[-1] - note_time.times[0]) / steps
    return seconds


class _NoteTime(StoppingCriteria):
    """Stops nothing, and notes when each token was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def main() -> None:
    """Measure both sides in turn and print."""
    arguments = parse_arguments(
        __doc__ or "",
        ("tokens", 2048),
        ("context", 128),
        ("steps", 32),
        ("repeats", 4),
        ("bfloat16", 0),
        ("threads", 0),
    )
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    sizes = (arguments.tokens, arguments.context, arguments.steps)
    forms = {TORCH: False} if arguments.bfloat16 else {NATIVE: True, TORCH: False}
    options = {"dtype": DTYPES[bool(arguments.bfloat16)], "kv_cache_memory_bytes": 2**29}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in (*forms, THEIRS)}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        folder = Path(directory) / "tiny"
        make_tiny_model("qwen3-next", folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ours = {
            name: stack.enter_context(LLM(folder, native_kernels=native, max_num_batched_tokens=8192, **options))
            for name, native in forms.items()
        }
        # All sides draw the same prompts.
        prompts = {name: Prompts(4096) for name in runs}
        for _ in range(arguments.repeats + 1):
            for name, llm in ours.items():
                runs[name].append(measure_ours(llm, prompts[name], *sizes))
            runs[THEIRS].append(measure_theirs(model, prompts[THEIRS], *sizes))
    best = {name: _best(measured[1:]) for name, measured in runs.items()}
    theirs = best.pop(THEIRS)
    rows = [row for form, figures in best.items() for row in _rows(form, figures, theirs, arguments.tokens)]
    print_rows(rows, as_json=arguments.json)


def _best(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: min(run[name] for run in runs) for name in runs[0]}


def _rows(form: str, ours: dict[str, float], theirs: dict[str, float], tokens: int) -> list[Row]:
    rows = []
    references = {THEIRS: theirs, **OTHERS}
    for name, value in ours.items():
        for other, figures in references.items():
            if name in figures:
                what = f"{name.format(tokens=tokens)}, {form}, beside {other}"
                rows.append(Row(what, 1e3 * value, "ms", 1e3 * figures[name], value / figures[name], command_line()))
    before = None
    for batch in BATCHES:
        rate = batch / ours[DECODE.format(batch=batch)]
        ratio = None if before is None else rate / before
        rows.append(Row(f"decode throughput at batch {batch}, {form}", rate, "tokens/s", before, ratio, command_line()))
        before = rate
    return rows


if __name__ == "__main__":
    main()
