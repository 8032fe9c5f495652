"""The Python API: prompts or conversations in, results out, as vLLM users know it."""

import os
from collections.abc import Generator, Mapping, Sequence
from inspect import Parameter, Signature
from types import TracebackType
from typing import Any, ClassVar, Self

from dalsegno.engine.build import Engine, build_engine
from dalsegno.engine.chat import list_conversations, parse_conversation, render_conversation
from dalsegno.engine.core import EngineCore
from dalsegno.engine.front_end import FrontEnd
from dalsegno.engine.inputs import Prompt, PromptLike, list_prompts
from dalsegno.engine.options import EngineOptions, option_specs
from dalsegno.engine.outputs import RequestOutput
from dalsegno.engine.tokenizer import Tokenizer
from dalsegno.errors import OptionError, RequestError
from dalsegno.obs.progress import Progress
from dalsegno.sampling_params import SamplingParams

__all__ = ["LLM", "Message", "SamplingLike"]

SamplingLike = SamplingParams | Sequence[SamplingParams] | None
Message = Mapping[str, Any]


def _signature() -> Signature:
    """The signature of `LLM`, with the options spelled out for `help()` and editors."""
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

    __signature__: ClassVar[Signature] = _signature()

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
        batch = self._prompt_batch(prompts, sampling_params)
        return self._run(batch, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
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
        batch = self._chat_batch(messages, sampling_params, tools, add_generation_prompt, chat_template_kwargs)
        return self._run(batch, use_tqdm)

    def stream(
        self, prompts: PromptLike | Sequence[PromptLike], sampling_params: SamplingLike = None
    ) -> Generator[RequestOutput, None, None]:
        """Answer prompts; yield a result each time one has got longer, the last one of a prompt with `finished`.

        Texts are whole, not pieces, and only grow. The prompts are checked by the call itself and queued when the first
        result is asked for; closing the iterator aborts what is unfinished. Arguments and errors are those of
        `generate`.
        """
        return self._stream(self._prompt_batch(prompts, sampling_params))

    def stream_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingLike = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Answer conversations as `stream` does; arguments and errors are those of `chat`."""
        return self._stream(
            self._chat_batch(messages, sampling_params, tools, add_generation_prompt, chat_template_kwargs)
        )

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of `transformers` that this engine uses.

        Raises:
            RequestError: the engine was made with `skip_tokenizer_init`.
        """
        return self._tokenizer().backend

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what is used where no parameters are given.

        As in vLLM: temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens of the checkpoint's
        generation_config.json, and the defaults of `SamplingParams` for everything else.
        """
        return SamplingParams(**self.default_sampling_options)

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

    def reset_prefix_cache(self) -> bool:
        """Forget everything cached; return False, with nothing changed, while requests are running."""
        return self.core.reset_prefix_cache()

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

    def _tokenizer(self) -> Tokenizer:
        tokenizer = self._open_engine().tokenizer
        if tokenizer is None:
            raise RequestError("this engine has no tokenizer (skip_tokenizer_init); give token ids")
        return tokenizer

    def _prompt_batch(
        self, prompts: PromptLike | Sequence[PromptLike], sampling_params: SamplingLike
    ) -> list[tuple[Prompt, SamplingParams]]:
        parser = self._open_engine().parser
        given = list_prompts(prompts)
        params = self._params(sampling_params, len(given))
        names = ["prompt"] if len(given) == 1 else [f"prompts[{index}]" for index in range(len(given))]
        return [(parser.parse(prompt, name), p) for prompt, name, p in zip(given, names, params, strict=True)]

    def _chat_batch(
        self,
        messages: Any,
        sampling_params: SamplingLike,
        tools: Any,
        add_generation_prompt: bool,
        template_options: Mapping[str, Any] | None,
    ) -> list[tuple[Prompt, SamplingParams]]:
        parser, tokenizer = self._open_engine().parser, self._tokenizer()
        given = list_conversations(messages)
        max_marks = self.options.max_states_per_request if self.options.enable_prefix_caching else 0
        batch = []
        for index, params in enumerate(self._params(sampling_params, len(given))):
            name = "messages" if len(given) == 1 else f"messages[{index}]"
            conversation = parse_conversation(
                given[index],
                tools,
                where=name,
                add_generation_prompt=add_generation_prompt,
                template_options=template_options,
            )
            rendered = render_conversation(tokenizer, conversation, max_marks)
            batch.append((parser.parse_rendered(rendered.text, rendered.token_ids, rendered.marks, name), params))
        return batch

    def _params(self, given: SamplingLike, count: int) -> list[SamplingParams]:
        if given is None:
            found = [self.get_default_sampling_params()] * count
        elif isinstance(given, SamplingParams):
            found = [given] * count
        elif isinstance(given, Sequence) and all(isinstance(params, SamplingParams) for params in given):
            found = list(given)
        else:
            raise OptionError(f"sampling_params must be a SamplingParams or a list of them, got {given!r:.60}")
        if len(found) != count:
            raise RequestError(f"sampling_params must be one, or one per prompt ({count}), got {len(found)}")
        for index, params in enumerate(found):
            self._open_engine().front_end.check(params, f"sampling_params[{index}]" if count > 1 else "sampling_params")
        return found

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
