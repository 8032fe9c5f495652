"""Tiny models for tests, made once per test process."""

import functools
import tempfile
from pathlib import Path

from dalsegno.types import GroupKind


@functools.cache
def tiny_model(kind: str, seed: int = 0) -> Path:
    """Make a tiny model of one kind; the folder lives as long as the process. Tests must not change it."""
    from dalsegno.models.tiny import make_tiny_model

    directory = Path(_folder().name) / f"{kind}-{seed}"
    make_tiny_model(kind, directory, seed)
    return directory


@functools.cache
def tiny_kinds_with(group: GroupKind) -> tuple[str, ...]:
    """The kinds of tiny model in which some layer keeps a cache of this kind."""
    import torch

    from dalsegno.models.registry import build_model
    from dalsegno.models.tiny import TINY_KINDS
    from dalsegno.models.tiny.kinds import tiny_config

    specs = {kind: build_model(tiny_config(kind), torch.float32, "meta").cache_specs() for kind in TINY_KINDS}
    return tuple(kind for kind in TINY_KINDS if any(spec.kind is group for spec in specs[kind]))


@functools.cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="dalsegno-tiny-")
