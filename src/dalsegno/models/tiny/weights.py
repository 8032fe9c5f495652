"""Weights of the tiny models: random, with scales chosen so that everything a cache holds shows in the answer.

Each tensor has a random stream of its own, keyed by seed and name, so neither order nor other tensors change it.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dalsegno.models.tiny.recipes import Recipe, mamba_sizes, recipe_of

__all__ = ["Array", "tiny_weights"]

Array = NDArray[np.float32]

_SHORTEST_HALF_LIFE = 8.0
_LONGEST_HALF_LIFE = 512.0

# Queries and keys stay in the linear part of SiLU: keys with a common mean overlap, and overwrite each other's values.
_CONV_KEY_GAIN = 0.5
# Scores with this much spread (squared) pick a few tokens out of hundreds instead of averaging over all.
_HEAD_NORM = 1.7

# The router reads a few dimensions of the residual stream that only the embedding writes, one per expert: which experts
# a token meets depends on the token alone, and the margin of the choice is far above rounding. A router on ordinary
# dimensions flips a choice by rounding once in some hundred thousand tokens, and then logits of two exact runs differ.
_RESIDUAL_WRITERS = ("o_proj", "out_proj", "down_proj", "output_linear")
_ROUTERS = (".mlp.gate.weight", ".router.layer.weight")
_ROUTER_GAIN = 1.0

_BIAS = 0.1
# What Mamba2 passes by its state: little, or the answer echoes the last token.
_SKIP = 0.1
_STEP_EXPONENT = 0.5


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
    recipe, kind = recipe_of(config), _leaf(name)
    if kind in ("A_log", "dt_bias", "D"):
        return _decay(kind, shape[0], has_delta=_has_delta(config))
    if kind.endswith(("norm", "norm_f")):
        return _norm_weight(name, shape, config, recipe)
    if name.endswith(_ROUTERS):
        return _router(stream, shape)
    noise = stream.standard_normal(shape, np.float32)
    if kind in ("embed_tokens", "embeddings"):
        return _with_expert_order(noise, stream, config) * np.float32(recipe.embedding)
    if name.endswith(".bias"):
        return noise * np.float32(_BIAS)
    gains = _row_gains(name, config, recipe).reshape(-1, *[1] * (len(shape) - 1))
    weight = noise * (gains / math.sqrt(shape[-1])).astype(np.float32)
    if kind == "conv1d" and _has_delta(config):
        weight[: 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]] *= np.float32(_CONV_KEY_GAIN)
    if kind in _RESIDUAL_WRITERS and _num_experts(config):
        weight[..., -_num_experts(config) :, :] = 0.0
    return weight


def _has_delta(config: Mapping[str, Any]) -> bool:
    return "linear_num_key_heads" in config


def _num_experts(config: Mapping[str, Any]) -> int:
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def _leaf(name: str) -> str:
    parts = name.split(".")
    return parts[-2] if parts[-1] in ("weight", "bias") else parts[-1]


def _row_gains(name: str, config: Mapping[str, Any], recipe: Recipe) -> NDArray[np.float64]:
    """Return the gain of each row of a matrix, or one for all."""
    kind, gains = _leaf(name), recipe.gains
    if kind == "in_proj" and "in_proj" not in gains:
        sizes = mamba_sizes(config)
        counts = (sizes.inner, sizes.inner, sizes.group, sizes.group, sizes.heads)
        return np.repeat([gains[part] for part in ("gate", "value", "key", "query", "step")], counts)
    parent = ".".join(name.split(".")[-3:-1])
    return np.asarray([gains[parent] if parent in gains else gains[kind]])


def _decay(kind: str, num_heads: int, *, has_delta: bool) -> Array:
    """Return parameters that give half-lives log-spaced over the heads.

    In a gated delta net the step is the decay itself. In Mamba2 it also scales what is added: a step of the root of
    the decay makes all heads speak equally loud, whatever their half-lives.
    """
    rates = math.log(2.0) / np.geomspace(_SHORTEST_HALF_LIFE, _LONGEST_HALF_LIFE, num_heads)
    steps = rates if has_delta else rates**_STEP_EXPONENT
    if kind == "D":
        return np.full(num_heads, _SKIP, np.float32)
    if kind == "A_log":
        return np.log(rates / steps).astype(np.float32)
    # The inverse of softplus.
    return np.log(np.expm1(steps)).astype(np.float32)


def _norm_weight(name: str, shape: tuple[int, ...], config: Mapping[str, Any], recipe: Recipe) -> Array:
    """Return a constant gain, as a distance from one in the norms that are stored so."""
    kind = _leaf(name)
    gain = _HEAD_NORM if kind in ("q_norm", "k_norm", "q_layernorm", "k_layernorm") else 1.0
    # The norm inside a gated delta net has the size of a head and is stored plainly.
    centred = recipe.centred_norms and (kind != "norm" or shape == (config["hidden_size"],))
    return np.full(shape, gain - 1.0 if centred else gain, np.float32)


def _with_expert_order(embedding: Array, stream: np.random.Generator, config: Mapping[str, Any]) -> Array:
    """Give every token a random order of experts, in the embedding's last dimensions."""
    if num_experts := _num_experts(config):
        levels = np.arange(num_experts, dtype=np.float32) - np.float32((num_experts - 1) / 2)
        embedding[:, -num_experts:] = stream.permuted(np.tile(levels, (len(embedding), 1)), axis=1)
    return embedding


def _router(stream: np.random.Generator, shape: tuple[int, ...]) -> Array:
    num_experts, _ = shape
    weight = np.zeros(shape, np.float32)
    columns = shape[1] - num_experts + stream.permutation(num_experts)
    weight[np.arange(num_experts), columns] = _ROUTER_GAIN
    return weight
