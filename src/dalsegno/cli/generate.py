"""`dalsegno generate`: prompts on the command line, answers on stdout while they come."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dalsegno.cli.terminal import note, summary
from dalsegno.engine.llm import LLM
from dalsegno.engine.outputs import RequestOutput
from dalsegno.errors import EngineError
from dalsegno.sampling_params import SamplingParams

__all__ = ["AnswerPrinter", "cli_sampling_params", "run_generate"]

_MAX_TOKENS = 256


def run_generate(
    model: str,
    prompts: Sequence[str],
    sampling_options: Mapping[str, Any],
    engine_options: Mapping[str, Any],
    *,
    json_lines: bool,
) -> None:
    """Answer `prompts` in one batch; answers are printed in order, those that wait for their turn are kept back.

    Raises:
        UserError: a bad option, model folder or prompt.
        EngineError: some answers failed; the others have been printed.
    """
    # What can be checked without the model is.
    SamplingParams(**sampling_options)
    with LLM(model, **engine_options) as llm:
        params = cli_sampling_params(llm, sampling_options)
        answer = _print_json if json_lines else _print_texts
        num_failed = answer(llm, prompts, params)
    if num_failed:
        raise EngineError(f"{num_failed} answers failed")


def _print_json(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> int:
    outputs = llm.generate(list(prompts), params)
    for output in outputs:
        sys.stdout.write(json.dumps(_as_json(output)) + "\n")
    return sum(map(_num_failed, outputs))


def _print_texts(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> int:
    printer = AnswerPrinter(prompts, params.n)
    num_failed = 0
    for output in llm.stream(list(prompts), params):
        # A fresh engine numbers its requests from 0, in the order of the prompts.
        printer.show(int(output.request_id), output)
        num_failed += _num_failed(output) if output.finished else 0
    return num_failed


def _num_failed(output: RequestOutput) -> int:
    return sum(answer.error is not None for answer in output.outputs)


def cli_sampling_params(llm: LLM, given: Mapping[str, Any]) -> SamplingParams:
    """Return what the flags ask for, on top of the checkpoint's defaults and a length that suits a terminal."""
    return SamplingParams(**({"max_tokens": _MAX_TOKENS} | llm.default_sampling_options | dict(given)))


class AnswerPrinter:
    """Writes the answers of several prompts to stdout one after the other, each as far as it is.

    Args:
        prompts: their texts, for the headings.
        num_samples: answers per prompt.
    """

    def __init__(self, prompts: Sequence[str], num_samples: int) -> None:
        self._prompts = prompts
        self._num_samples = num_samples
        self._outputs: dict[int, RequestOutput] = {}
        self._place = (0, 0)
        self._num_shown = 0
        self._headed = False

    def show(self, index: int, output: RequestOutput) -> None:
        """Take what has come of prompt `index` and write what is its turn."""
        self._outputs[index] = output
        while self._show_current():
            pass

    def _show_current(self) -> bool:
        """Write the new text of the answer whose turn it is; return whether that one is done."""
        prompt, sample = self._place
        if prompt not in self._outputs:
            return False
        output = self._outputs[prompt]
        self._head(prompt, sample)
        answer = output.outputs[sample]
        sys.stdout.write(answer.text[self._num_shown :])
        self._num_shown = len(answer.text)
        if not answer.finished:
            sys.stdout.flush()
            return False
        sys.stdout.write("\n")
        sys.stdout.flush()
        if answer.error is not None:
            note(f"failed: {answer.error}")
        last = sample + 1 == self._num_samples
        if last:
            note(summary(output))
        self._place = (prompt + 1, 0) if last else (prompt, sample + 1)
        self._num_shown, self._headed = 0, False
        return True

    def _head(self, prompt: int, sample: int) -> None:
        if self._headed or (len(self._prompts) == 1 and self._num_samples == 1):
            return
        text = " ".join(self._prompts[prompt].split())
        which = f"{prompt + 1}.{sample + 1}" if self._num_samples > 1 else f"{prompt + 1}"
        note(f"{which}: {text if len(text) <= 60 else text[:59] + '…'}")
        self._headed = True


def _as_json(output: RequestOutput) -> dict[str, Any]:
    report = output.hit_report
    return {
        "request_id": output.request_id,
        "prompt": output.prompt,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "num_prefilled_tokens": output.metrics.num_prefilled_tokens,
        "time_to_first_token": output.metrics.time_to_first_token,
        "lost": {} if report is None else report.lost,
        "outputs": [
            {
                "index": answer.index,
                "text": answer.text,
                "token_ids": answer.token_ids,
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
                "error": answer.error,
            }
            for answer in output.outputs
        ],
    }
