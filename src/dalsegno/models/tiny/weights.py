"""Weights of the tiny models: random, with scales chosen so that everything a cache holds shows in the answer.

Each tensor has a random stream of its own, keyed by seed and name, so neither order nor other tensors change it.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["tiny_weights"]

Array = NDArray[np.float32]

_SHORTEST_HALF_LIFE = 8.0
_LONGEST_HALF_LIFE = 512.0

# Standard deviation of what a linear map gives for an input of unit size.
_GAINS = {
    "q_proj": 1.4,
    "k_proj": 1.4,
    "v_proj": 1.0,
    "o_proj": 1.0,
    "gate_proj": 1.0,
    "up_proj": 1.0,
    "down_proj": 1.0,
    "in_proj_qkvz": 1.0,
    "in_proj_ba": 0.32,
    "conv1d": 1.0,
    "out_proj": 1.0,
    "shared_expert_gate": 1.0,
    "lm_head": 3.0,
}
_HEAD_NORM = 1.4

# The router reads a few dimensions of the residual stream that only the embedding writes, one per expert: which experts
# a token meets depends on the token alone, and the margin of the choice is far above rounding. A router on ordinary
# dimensions flips a choice by rounding once in some hundred thousand tokens, and then logits of two exact runs differ.
_RESIDUAL_WRITERS = ("o_proj", "out_proj", "down_proj")
_ROUTER_GAIN = 1.0


def tiny_weights(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], seed: int) -> dict[str, Array]:
    """Return a float32 array for every tensor name.

    Args:
        shapes: tensor name -> shape on disk.
        config: config.json of the kind.
        seed: of the random streams.
    """
    return {name: _tensor(name, shape, config, seed) for name, shape in sorted(shapes.items())}


def _stream(name: str, seed: int) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def _tensor(name: str, shape: tuple[int, ...], config: Mapping[str, Any], seed: int) -> Array:
    stream = _stream(name, seed)
    kind = _leaf(name)
    if kind == "A_log":
        return np.zeros(shape, np.float32)
    if kind == "dt_bias":
        return _dt_bias(shape[0])
    if kind.endswith("norm") or kind.endswith("layernorm"):
        return _norm_weight(kind, shape, config)
    if kind == "gate":
        return _router(stream, shape)
    noise = stream.standard_normal(shape, np.float32)
    if kind == "embed_tokens":
        return _with_expert_order(noise, stream, config)
    weight = noise * np.float32(_GAINS[kind] / math.sqrt(math.prod(shape[1:])))
    if kind in _RESIDUAL_WRITERS and "num_experts" in config:
        weight[-config["num_experts"] :] = 0.0
    return weight


def _leaf(name: str) -> str:
    parts = name.split(".")
    return parts[-2] if parts[-1] in ("weight", "bias") else parts[-1]


def _dt_bias(num_heads: int) -> Array:
    """Return the bias that gives half-lives log-spaced over the heads: the inverse softplus of ln 2 / half-life."""
    half_lives = np.geomspace(_SHORTEST_HALF_LIFE, _LONGEST_HALF_LIFE, num_heads)
    return np.log(np.expm1(math.log(2.0) / half_lives)).astype(np.float32)


def _norm_weight(kind: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> Array:
    """Return a constant gain, as a distance from one in the norms that are stored so."""
    gain = _HEAD_NORM if kind in ("q_norm", "k_norm") else 1.0
    centred = config["model_type"] == "qwen3_next" and not (kind == "norm" and shape != (config["hidden_size"],))
    return np.full(shape, gain - 1.0 if centred else gain, np.float32)


def _with_expert_order(embedding: Array, stream: np.random.Generator, config: Mapping[str, Any]) -> Array:
    """Give every token a random order of experts, in the embedding's last dimensions."""
    num_experts = config.get("num_experts", 0)
    if num_experts:
        levels = np.arange(num_experts, dtype=np.float32) - np.float32((num_experts - 1) / 2)
        embedding[:, -num_experts:] = stream.permuted(np.tile(levels, (len(embedding), 1)), axis=1)
    return embedding


def _router(stream: np.random.Generator, shape: tuple[int, ...]) -> Array:
    num_experts, _ = shape
    weight = np.zeros(shape, np.float32)
    columns = shape[1] - num_experts + stream.permutation(num_experts)
    weight[np.arange(num_experts), columns] = _ROUTER_GAIN
    return weight
