"""Dalsegno: a serving engine and KV-cache layer for hybrid language models.

`LLM`, `AsyncLLM` and `SamplingParams` are the whole public API of the package root; they are imported on first use, so
that `import dalsegno` (and every package below it that needs no torch) stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dalsegno.engine.async_llm import AsyncLLM
    from dalsegno.engine.llm import LLM
    from dalsegno.sampling_params import SamplingParams

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "dalsegno.engine.async_llm",
    "LLM": "dalsegno.engine.llm",
    "SamplingParams": "dalsegno.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, whether they were imported yet or not."""
    return sorted(__all__)
