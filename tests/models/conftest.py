"""Tiny models, each made and loaded once per process."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dalsegno.models.base import CausalLM
from dalsegno.models.registry import load_model
from tests.matrix import tiny_models

FolderOf = Callable[[str], Path]
ModelOf = Callable[[str], CausalLM]


@pytest.fixture(scope="session")
def tiny_folder() -> FolderOf:
    """Give the folder of a kind; tests must not change it."""
    return tiny_models.tiny_model


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: FolderOf) -> ModelOf:
    """Give the loaded model of a kind."""

    @functools.cache
    def model(kind: str) -> CausalLM:
        return load_model(tiny_folder(kind), torch.float32, "cpu")

    return model
