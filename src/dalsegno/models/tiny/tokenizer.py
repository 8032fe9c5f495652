"""A byte-level BPE tokenizer trained on text that ships with Python, and its chat template.

The same Python gives the same tokenizer: files are read in a fixed order and cut at fixed lengths. Another Python
version ships other text and may give other merges.
"""

import ast
import functools
import itertools
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dalsegno.errors import CheckpointError

__all__ = ["SPECIAL_TOKENS", "VOCAB_SIZE", "write_tokenizer"]

VOCAB_SIZE = 4096
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Special tokens in the order of their ids, from 0."""

_MOST_CHARACTERS = 800_000
_MODEL_LENGTH = 32768
_TEMPLATE_FILE = "chat_template.jinja"


def write_tokenizer(directory: Path) -> None:
    """Train the tokenizer and write tokenizer.json, tokenizer_config.json and chat_template.jinja.

    Raises:
        CheckpointError: this Python ships too little text to train on.
    """
    (directory / "tokenizer.json").write_text(_trained_tokenizer(), encoding="utf-8")
    config = json.dumps(_tokenizer_config(), indent=2, sort_keys=True) + "\n"
    (directory / "tokenizer_config.json").write_text(config, encoding="utf-8")
    template = Path(__file__).with_name(_TEMPLATE_FILE).read_text(encoding="utf-8")
    (directory / _TEMPLATE_FILE).write_text(template, encoding="utf-8")


@functools.cache
def _trained_tokenizer() -> str:
    """Return tokenizer.json; trained once per process, since it takes seconds and is the same for every kind."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise CheckpointError(
            f"the text that ships with {sys.executable} gives {tokenizer.get_vocab_size()} tokens, {VOCAB_SIZE} are"
            " needed; use a Python whose standard library has its source files"
        )
    return tokenizer.to_str(pretty=False)


def _tokenizer_config() -> dict[str, Any]:
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": _MODEL_LENGTH,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _training_texts() -> Iterator[str]:
    """Yield the language reference of pydoc, the docstrings of the standard library, and some of its source."""
    left = _MOST_CHARACTERS
    for text in itertools.chain(_pydoc_topics(), _library_texts()):
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def _pydoc_topics() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return []
    return [topics[name] for name in sorted(topics)]


def _library_texts() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py")):
        if "site-packages" in file.parts or "test" in file.parts:
            continue
        try:
            source = file.read_text(encoding="utf-8")
            docstring = ast.get_docstring(ast.parse(source))
        except (OSError, SyntaxError, ValueError):
            continue
        if docstring:
            yield docstring
        yield source[:2000]
