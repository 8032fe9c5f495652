"""Tiny models made once per session, and loaded once per kind."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dalsegno.models.base import CausalLM
from dalsegno.models.registry import load_model
from dalsegno.models.tiny import make_tiny_model

FolderOf = Callable[[str], Path]
ModelOf = Callable[[str], CausalLM]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """Give the folder of a kind; tests must not change it."""

    @functools.cache
    def folder(kind: str) -> Path:
        path = tmp_path_factory.mktemp("tiny") / kind
        make_tiny_model(kind, path)
        return path

    return folder


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: FolderOf) -> ModelOf:
    """Give the loaded model of a kind."""

    @functools.cache
    def model(kind: str) -> CausalLM:
        return load_model(tiny_folder(kind), torch.float32, "cpu")

    return model
