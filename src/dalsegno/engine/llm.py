"""The Python API: prompts or conversations in, results out, as vLLM users know it."""

import os
from collections.abc import Generator, Mapping, Sequence
from inspect import Parameter, Signature
from types import TracebackType
from typing import Any, ClassVar, Self

from dalsegno.engine.batches import BatchMaker, SamplingLike
from dalsegno.engine.build import Engine, build_engine
from dalsegno.engine.chat import MessageLike
from dalsegno.engine.core import EngineCore
from dalsegno.engine.front_end import FrontEnd
from dalsegno.engine.inputs import Prompt, PromptLike
from dalsegno.engine.options import EngineOptions, option_specs
from dalsegno.engine.outputs import RequestOutput
from dalsegno.errors import RequestError
from dalsegno.obs.progress import Progress
from dalsegno.sampling_params import SamplingParams

__all__ = ["LLM", "options_signature"]


def options_signature() -> Signature:
    """The signature of what is made from a model and options, spelled out for `help()` and editors."""
    parameters = [Parameter("model", Parameter.POSITIONAL_OR_KEYWORD, annotation=str | os.PathLike[str])]
    parameters += [
        Parameter(spec.name, Parameter.KEYWORD_ONLY, default=spec.default, annotation=spec.type)
        for spec in option_specs()
    ]
    return Signature(parameters)


class LLM:
    """A model, its cache and its scheduler, used from one thread; several may live in one process.

    Args:
        model: a folder in Hugging Face form, or a hub id such as "owner/name".
        options: see `EngineOptions`; options of vLLM that ask for nothing are accepted, others are refused by name.

    Attributes:
        options: the options as they were given.

    Raises:
        OptionError: an option is unknown, out of range, or does not fit the model or the machine.
        CheckpointError: the model folder cannot be served as it is.
    """

    __signature__: ClassVar[Signature] = options_signature()

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        self.options = EngineOptions.from_keywords(options)
        self._engine: Engine | None = build_engine(model, self.options)
        self._model = os.fspath(model)

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingLike = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts; return one result per prompt, in order.

        An answer ends at `max_tokens` or at the model's length, whichever comes first. A request that failed inside the
        engine has `finish_reason` "error"; the others are not affected. A Ctrl-C aborts the prompts of this call and
        leaves the engine as it was.

        Args:
            prompts: one prompt or a list of them. A prompt is a text, a list of token ids, or a dict with one of
                `prompt` and `prompt_token_ids` and, if wanted, `cache_salt` (only prompts with the same salt share
                what is cached), `priority` (smaller first) and `checkpoint_at`
                (token counts at which a state is worth keeping).
            sampling_params: one for all prompts, or one per prompt; None takes the defaults of
                `get_default_sampling_params`.
            use_tqdm: show progress on a terminal when it takes longer.

        Raises:
            RequestError: a prompt or its parameters are not allowed; then none of the batch was queued.
        """
        return self._run(self._batches().prompts(prompts, sampling_params), use_tqdm)

    def chat(
        self,
        messages: Sequence[MessageLike] | Sequence[Sequence[MessageLike]],
        sampling_params: SamplingLike = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations; return one result per conversation, in order.

        Args:
            messages: one conversation (dicts with `role`, `content`, `tool_calls` …) or a list of them.
            sampling_params: as for `generate`.
            use_tqdm: as for `generate`.
            tools: function schemas offered to the model.
            add_generation_prompt: end the prompt with the opening of an assistant message.
            chat_template_kwargs: further variables of the checkpoint's template, such as `enable_thinking`.

        Raises:
            RequestError: as `generate`; also a conversation the template refuses, or no template at all.
        """
        batch = self._batches().conversations(
            messages, sampling_params, tools, add_generation_prompt, chat_template_kwargs
        )
        return self._run(batch, use_tqdm)

    def stream(
        self, prompts: PromptLike | Sequence[PromptLike], sampling_params: SamplingLike = None
    ) -> Generator[RequestOutput, None, None]:
        """Answer prompts; yield a result each time one has got longer, the last one of a prompt with `finished`.

        Texts are whole, not pieces, and only grow. The prompts are checked by the call itself and queued when the first
        result is asked for; closing the iterator aborts what is unfinished. Arguments and errors are those of
        `generate`.
        """
        return self._stream(self._batches().prompts(prompts, sampling_params))

    def stream_chat(
        self,
        messages: Sequence[MessageLike] | Sequence[Sequence[MessageLike]],
        sampling_params: SamplingLike = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Answer conversations as `stream` does; arguments and errors are those of `chat`."""
        return self._stream(
            self._batches().conversations(messages, sampling_params, tools, add_generation_prompt, chat_template_kwargs)
        )

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of `transformers` that this engine uses.

        Raises:
            RequestError: the engine was made with `skip_tokenizer_init`.
        """
        return self._batches().tokenizer.backend

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what is used where no parameters are given.

        As in vLLM: temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens of the checkpoint's
        generation_config.json, and the defaults of `SamplingParams` for everything else.
        """
        return self._batches().default_params()

    @property
    def default_sampling_options(self) -> dict[str, Any]:
        """The keyword arguments of `get_default_sampling_params`."""
        return dict(self._open_engine().sampling_defaults)

    @property
    def core(self) -> EngineCore:
        """The engine core, for tools that look inside; requests go in through the methods above."""
        return self._open_engine().core

    @property
    def start_up_plan(self) -> str:
        """How the memory is cut, how many tokens and states fit, and the shortest prompt that can hit."""
        return self._open_engine().start_up_plan

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_external: bool = False) -> bool:
        """Forget everything cached; return False, with nothing changed, while requests are running.

        Args:
            reset_running_requests: send running requests back to the queue instead; they start over.
            reset_external: empty this engine's part of the store too.
        """
        return self.core.reset_prefix_cache(
            reset_running_requests=reset_running_requests, reset_external=reset_external
        )

    def stats(self) -> dict[str, int | float]:
        """Return the engine's counters since the start, and what is in use at this moment, by name.

        Names are vLLM's metrics where it has one: `prompt_tokens`, `generation_tokens`, `prefix_cache_queries` and
        `prefix_cache_hits` (tokens), `num_preemptions`, `num_requests_running`, `kv_cache_usage_perc` (a share of 1).
        `prefix_cache_lost_tokens_REASON` adds up what the hit reports say.
        """
        return self.core.stats()

    def finish_checks(self) -> None:
        """Run what `verify_prefix_cache` has chosen and not computed yet; `stats` then says what was found.

        Otherwise that is done in the steps of later calls, beside their prompts, and dropped by `close`.
        """
        front_end = self._open_engine().front_end
        while self.core.has_pending_checks:
            front_end.step()

    def verify(self) -> None:
        """Recompute every count of the cache from first principles.

        Raises:
            AssertionError: one of them is wrong; the message names it.
        """
        self.core.verify()

    def close(self) -> None:
        """Give back the memory; unfinished requests are dropped, their streams raise. A second call does nothing."""
        if self._engine is not None:
            self._engine.front_end.close()
            self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({self._model!r}{', closed' if self._engine is None else ''})"

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise RequestError(f"this LLM of {self._model} has been closed; make a new one")
        return self._engine

    def _batches(self) -> BatchMaker:
        return BatchMaker(self._open_engine(), self.options)

    def _run(self, batch: Sequence[tuple[Prompt, SamplingParams]], show_progress: bool) -> list[RequestOutput]:
        front_end = self._open_engine().front_end
        answers = front_end.submit(batch)
        try:
            with Progress("prompts", len(answers), enabled=show_progress) as progress:
                for answer in answers:
                    while not answer.finished:
                        front_end.step()
                        if progress.is_due():
                            done = sum(answer.finished for answer in answers)
                            progress.show(done, sum(answer.num_tokens for answer in answers))
        except BaseException:
            front_end.abort(answers)
            raise
        return [answer.output() for answer in answers]

    def _stream(self, batch: Sequence[tuple[Prompt, SamplingParams]]) -> Generator[RequestOutput, None, None]:
        return _follow(self._open_engine().front_end, batch)


def _follow(
    front_end: FrontEnd, batch: Sequence[tuple[Prompt, SamplingParams]]
) -> Generator[RequestOutput, None, None]:
    """Queue prompts and yield their results as they grow; whoever else steps the engine advances them too."""
    answers = front_end.submit(batch)
    shown = dict.fromkeys(range(len(answers)), 0)
    try:
        while shown:
            for index in list(shown):
                finished, num_tokens = answers[index].finished, answers[index].num_tokens
                if finished or num_tokens > shown[index]:
                    yield answers[index].output()
                    shown[index] = num_tokens
                if finished:
                    del shown[index]
            if shown and not any(answers[index].finished for index in shown):
                front_end.step()
    finally:
        front_end.abort(answers)
