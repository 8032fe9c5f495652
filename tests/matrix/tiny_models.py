"""Tiny models for tests, made once per test process."""

import functools
import tempfile
from pathlib import Path


@functools.cache
def tiny_model(kind: str, seed: int = 0) -> Path:
    """Make a tiny model of one kind; the folder lives as long as the process."""
    from dalsegno.models.tiny import make_tiny_model

    directory = Path(_folder().name) / f"{kind}-{seed}"
    make_tiny_model(kind, directory, seed)
    return directory


@functools.cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="dalsegno-tiny-")
