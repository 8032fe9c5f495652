"""An `LLM` without a model: the real engine core on the fake worker, with a small tokenizer made on the spot."""

from collections.abc import Callable
from functools import cache
from typing import Any

from dalsegno.engine.build import Engine
from dalsegno.engine.core import EngineCore
from dalsegno.engine.front_end import FrontEnd
from dalsegno.engine.inputs import PromptParser
from dalsegno.engine.llm import LLM
from dalsegno.engine.options import EngineOptions
from dalsegno.engine.tokenizer import Tokenizer
from dalsegno.kv.layout import plan_layout
from dalsegno.kv.start_up import describe_plan
from dalsegno.sched.cold_checks import ColdCheckSetup
from dalsegno.testing.fake_worker import FakeClock, FakeWorker
from dalsegno.types import CachePart, GroupKind, LayerCacheSpec

MODEL_LENGTH = 512
NUM_SLABS = 400
VOCAB_SIZE = 400
IM_END = 2
SPECS = [
    LayerCacheSpec(0, GroupKind.STATE, (CachePart("recurrent", (8,), "float32"),)),
    LayerCacheSpec(
        1, GroupKind.ATTENTION, (CachePart("key", (1, 4), "float32"), CachePart("value", (1, 4), "float32"))
    ),
]
TEXT = (
    "The quick brown fox jumps over the lazy dog. Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. "
    "敏捷的棕色狐狸跳过懒狗。 いろはにほへと ちりぬるを 🦊🐕 def main(): return {'key': [1, 2, 3]}\n"
)
TEMPLATE = (
    "{%- if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif -%}"
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<call>{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}</call>{% endfor -%}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)


@cache
def small_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """A byte-level BPE tokenizer in which most characters outside ASCII take several tokens."""
    from tokenizers import Tokenizer as Raw
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Raw(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator([TEXT] * 4, trainer)
    backend = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    backend.chat_template = template
    return Tokenizer(backend)


def build_stand_in(options: EngineOptions, tokenizer: Tokenizer | None) -> Engine:
    """Everything `build_engine` makes, on the fake worker."""
    config, cache_config = options.scheduler_config(MODEL_LENGTH), options.cache_config()
    layout = plan_layout(SPECS, cache_config, num_slabs=NUM_SLABS)
    clock = FakeClock()
    worker = FakeWorker(layout, clock, vocab_size=VOCAB_SIZE)
    checks = ColdCheckSetup(options.verify_prefix_cache, options.seed)
    core = EngineCore(worker, clock, layout, cache_config, config, debug=True, cold_checks=checks)
    front_end = FrontEnd(
        core,
        clock,
        tokenizer,
        vocab_size=VOCAB_SIZE,
        end_token_ids=frozenset({IM_END, VOCAB_SIZE + 7}),
        max_model_len=config.max_model_len,
        seed=options.seed,
    )
    parser = PromptParser(None if tokenizer is None else tokenizer.encode, VOCAB_SIZE, config.max_model_len)
    return Engine(core, front_end, parser, tokenizer, describe_plan(layout, cache_config, MODEL_LENGTH), {"top_k": 7})


def make_llm(monkeypatch: Any, **options: Any) -> LLM:
    """An LLM on the stand-in engine, with the options of a real one."""

    def build(_model: str, resolved: EngineOptions) -> Engine:
        return build_stand_in(resolved, None if resolved.skip_tokenizer_init else small_tokenizer())

    builder: Callable[..., Engine] = build
    monkeypatch.setattr("dalsegno.engine.llm.build_engine", builder)
    return LLM("stand-in", **options)


def worker_of(llm: LLM) -> FakeWorker:
    """The fake worker of a stand-in LLM."""
    engine = llm._engine
    assert engine is not None
    worker = engine.core.worker
    assert isinstance(worker, FakeWorker)
    return worker
