"""`dalsegno chat`: a conversation at the terminal."""

import sys
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any

from dalsegno.cli.generate import cli_sampling_params
from dalsegno.cli.terminal import note, summary
from dalsegno.engine.llm import LLM
from dalsegno.engine.outputs import RequestOutput
from dalsegno.errors import RequestError
from dalsegno.sampling_params import SamplingParams

__all__ = ["run_chat"]

_HELP = "/reset starts a new conversation, /quit (or Ctrl-D) ends, Ctrl-C stops an answer"


def run_chat(
    model: str, sampling_options: Mapping[str, Any], engine_options: Mapping[str, Any], *, system: str | None
) -> None:
    """Answer what is typed until /quit or the end of input.

    Raises:
        UserError: a bad option or model folder.
    """
    if SamplingParams(**sampling_options).n != 1:
        raise RequestError("a chat has one answer per turn: n must be 1")
    with LLM(model, **engine_options) as llm:
        params = cli_sampling_params(llm, sampling_options)
        opening = [] if system is None else [{"role": "system", "content": system}]
        messages = list(opening)
        if sys.stdin.isatty():
            note(_HELP)
        while (line := _read_line()) is not None:
            if line == "/quit":
                return
            if line == "/reset":
                messages = list(opening)
                note("new conversation")
            elif line.startswith("/"):
                note(f"no command {line.split()[0]}; {_HELP}")
            elif line:
                _take_turn(llm, messages, line, params)


def _read_line() -> str | None:
    """Return the next line without outer blanks, or None at the end of input."""
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` line editing and history
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            note(f"\n{_HELP}")


def _take_turn(llm: LLM, messages: list[dict[str, Any]], line: str, params: SamplingParams) -> None:
    """Answer one line; the conversation grows by it and by as much of the answer as there was, if any."""
    messages.append({"role": "user", "content": line})
    try:
        output = _stream_answer(llm, messages, params)
    except RequestError as error:
        # Most likely too long by now: the conversation stays as it was before the line.
        messages.pop()
        note(f"error: {error}")
        return
    if output is None:
        messages.pop()
        return
    messages.append({"role": "assistant", "content": output.outputs[0].text})
    note(summary(output))


def _stream_answer(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams) -> RequestOutput | None:
    output: RequestOutput | None = None
    num_shown = 0
    try:
        with closing(llm.stream_chat(messages, params)) as stream:
            for output in stream:
                text = output.outputs[0].text
                sys.stdout.write(text[num_shown:])
                sys.stdout.flush()
                num_shown = len(text)
    except KeyboardInterrupt:
        note("\n(stopped)")
    sys.stdout.write("\n")
    sys.stdout.flush()
    if output is not None and output.outputs[0].error is not None:
        note(f"failed: {output.outputs[0].error}")
    return output
