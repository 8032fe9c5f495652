"""Weights of the tiny models: random, with scales chosen so that everything a cache holds shows in the answer.

Each tensor has a random stream of its own, keyed by seed and name, so neither order nor other tensors change it.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "tiny_weights"]

Array = NDArray[np.float32]

_SHORTEST_HALF_LIFE = 8.0
_LONGEST_HALF_LIFE = 512.0

# Standard deviation of what a linear map gives for an input of unit size. Too little from the mixers, and the answer
# echoes the last token whatever the caches hold; too much, and every answer runs into the same few tokens.
_DENSE_GAINS = {
    "q_proj": 1.7,
    "k_proj": 1.7,
    "v_proj": 1.0,
    "o_proj": 1.2,
    "gate_proj": 1.0,
    "up_proj": 1.0,
    "down_proj": 1.2,
    "lm_head": 3.0,
}
# One layer in four attends, and half of what it says is gated away: its output has to speak up.
_HYBRID_GAINS = _DENSE_GAINS | {
    "o_proj": 3.0,
    "down_proj": 0.5,
    "in_proj_qkvz": 1.0,
    "in_proj_ba": 0.32,
    "conv1d": 1.0,
    "out_proj": 1.5,
    "shared_expert_gate": 1.0,
}
# Queries and keys stay in the linear part of SiLU: keys with a common mean overlap, and overwrite each other's values.
_CONV_KEY_GAIN = 0.5
# Scores with this much spread (squared) pick a few tokens out of hundreds instead of averaging over all.
_HEAD_NORM = 1.7

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
    if kind.endswith("norm"):
        return _norm_weight(kind, shape, config)
    if kind == "gate":
        return _router(stream, shape)
    noise = stream.standard_normal(shape, np.float32)
    if kind == "embed_tokens":
        return _with_expert_order(noise, stream, config)
    gains = _HYBRID_GAINS if _is_hybrid(config) else _DENSE_GAINS
    weight = noise * np.float32(gains[kind] / math.sqrt(math.prod(shape[1:])))
    if kind == "conv1d":
        weight[: 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]] *= np.float32(_CONV_KEY_GAIN)
    if kind in _RESIDUAL_WRITERS and _is_hybrid(config):
        weight[-config["num_experts"] :] = 0.0
    return weight


def _is_hybrid(config: Mapping[str, Any]) -> bool:
    return bool(config["model_type"] == "qwen3_next")


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
    # The norm inside a gated delta net has the size of a head and is stored plainly.
    centred = _is_hybrid(config) and (kind != "norm" or shape == (config["hidden_size"],))
    return np.full(shape, gain - 1.0 if centred else gain, np.float32)


def _with_expert_order(embedding: Array, stream: np.random.Generator, config: Mapping[str, Any]) -> Array:
    """Give every token a random order of experts, in the embedding's last dimensions."""
    if _is_hybrid(config):
        num_experts = config["num_experts"]
        levels = np.arange(num_experts, dtype=np.float32) - np.float32((num_experts - 1) / 2)
        embedding[:, -num_experts:] = stream.permuted(np.tile(levels, (len(embedding), 1)), axis=1)
    return embedding


def _router(stream: np.random.Generator, shape: tuple[int, ...]) -> Array:
    num_experts, _ = shape
    weight = np.zeros(shape, np.float32)
    columns = shape[1] - num_experts + stream.permutation(num_experts)
    weight[np.arange(num_experts), columns] = _ROUTER_GAIN
    return weight
