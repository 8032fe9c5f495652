"""From what a caller gives to checked prompts, each with its sampling parameters; nothing is queued here.

May be called from any thread: all it holds is settings.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dalsegno.engine.build import Engine
from dalsegno.engine.chat import MessageLike, list_conversations, parse_conversation, render_conversation
from dalsegno.engine.inputs import Prompt, PromptLike, list_prompts
from dalsegno.engine.options import EngineOptions
from dalsegno.engine.tokenizer import Tokenizer
from dalsegno.errors import OptionError, RequestError
from dalsegno.sampling_params import SamplingParams

__all__ = ["Batch", "BatchMaker", "SamplingLike"]

SamplingLike = SamplingParams | Sequence[SamplingParams] | None
Batch = list[tuple[Prompt, SamplingParams]]


class BatchMaker:
    """Checks prompts and conversations for one engine."""

    def __init__(self, engine: Engine, options: EngineOptions) -> None:
        """Use the engine's parser and tokenizer."""
        self._engine = engine
        self._max_marks = options.max_states_per_request if options.enable_prefix_caching else 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer.

        Raises:
            RequestError: it was made without one.
        """
        if self._engine.tokenizer is None:
            raise RequestError("this engine has no tokenizer (skip_tokenizer_init); give token ids")
        return self._engine.tokenizer

    def default_params(self) -> SamplingParams:
        """What is used where no parameters are given: the checkpoint's, then those of `SamplingParams`."""
        return SamplingParams(**self._engine.sampling_defaults)

    def prompts(self, prompts: PromptLike | Sequence[PromptLike], sampling_params: SamplingLike) -> Batch:
        """Check prompts.

        Raises:
            RequestError, OptionError: one of them, or its parameters, are not allowed.
        """
        given = list_prompts(prompts)
        params = self._params(sampling_params, len(given))
        names = ["prompt"] if len(given) == 1 else [f"prompts[{index}]" for index in range(len(given))]
        parser = self._engine.parser
        return [(parser.parse(prompt, name), p) for prompt, name, p in zip(given, names, params, strict=True)]

    def conversations(
        self,
        messages: Sequence[MessageLike] | Sequence[Sequence[MessageLike]],
        sampling_params: SamplingLike,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_options: Mapping[str, Any] | None,
    ) -> Batch:
        """Render conversations and check them.

        Raises:
            RequestError, OptionError: as `prompts`; also a conversation the template refuses, or no template at all.
        """
        tokenizer = self.tokenizer
        given = list_conversations(messages)
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
            rendered = render_conversation(tokenizer, conversation, self._max_marks)
            prompt = self._engine.parser.parse_rendered(rendered.text, rendered.token_ids, rendered.marks, name)
            batch.append((prompt, params))
        return batch

    def _params(self, given: SamplingLike, count: int) -> list[SamplingParams]:
        if given is None:
            found = [self.default_params()] * count
        elif isinstance(given, SamplingParams):
            found = [given] * count
        elif isinstance(given, Sequence) and all(isinstance(params, SamplingParams) for params in given):
            found = list(given)
        else:
            raise OptionError(f"sampling_params must be a SamplingParams or a list of them, got {given!r:.60}")
        if len(found) != count:
            raise RequestError(f"sampling_params must be one, or one per prompt ({count}), got {len(found)}")
        for index, params in enumerate(found):
            self._engine.front_end.check(params, f"sampling_params[{index}]" if count > 1 else "sampling_params")
        return found
