"""Runs the command line in this process on the stand-in engine."""

from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dalsegno.cli.main import app
from dalsegno.engine.llm import LLM
from dalsegno.engine.options import EngineOptions
from tests.engine.stand_in import build_stand_in, small_tokenizer


class Engines:
    """Replaces the engines the commands make, and remembers what they were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.models: list[str] = []
        self.options: list[EngineOptions] = []
        self.workers: list[Any] = []
        self.before_step: Any = None
        monkeypatch.setattr("dalsegno.engine.llm.build_engine", self._build)

    def _build(self, model: str, options: EngineOptions) -> Any:
        self.models.append(model)
        self.options.append(options)
        engine = build_stand_in(options, None if options.skip_tokenizer_init else small_tokenizer())
        worker: Any = engine.core.worker
        worker.before_step = self.before_step
        self.workers.append(worker)
        return engine

    def reference(self) -> LLM:
        """A fresh LLM on the same stand-in."""
        return LLM("reference")


def run(*arguments: str, stdin: str | None = None) -> Result:
    """Run `dalsegno` with arguments; a user's error must never come out as an exception."""
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result
