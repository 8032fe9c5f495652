"""Rotary position embedding: its config in old and new spelling, its frequencies, its rotation.

Supported types: default, linear, llama3, yarn. Types whose angles depend on the length of the text (dynamic, longrope)
are refused: a key computed in a short prompt would be wrong in a longer one, so its KV could not be reused.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dalsegno.models.config_fields import ConfigFields

__all__ = ["RopeConfig", "RotaryEmbedding", "Rotation", "apply_rotary", "read_rope_config"]

Rotation = tuple[Tensor, Tensor] | None
"""Cosine and sine of a step's positions, each `[T, 1, rotary_dim / 2]`; None in a model that rotates nothing."""

_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Checked rotary settings.

    Attributes:
        rotary_dim: how many leading dimensions of a head are rotated; even.
        theta: base of the frequencies.
        rope_type: one of default, linear, llama3, yarn.
        factor: how much longer than in pretraining texts may be.
        original_length: `original_max_position_embeddings`, tokens; llama3 and yarn only.
        low, high: llama3: low and high frequency factor; yarn: slow and fast beta.
        attention_factor: factor on cosine and sine.
        truncate: yarn: round the ends of the ramp to whole dimensions.
    """

    rotary_dim: int
    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    original_length: float = 0.0
    low: float = 0.0
    high: float = 0.0
    attention_factor: float = 1.0
    truncate: bool = True


def read_rope_config(
    fields: ConfigFields, head_dim: int, default_partial: float | None = None, default_theta: float = 10_000.0
) -> RopeConfig:
    """Read `rope_parameters`, or the older `rope_scaling`, `rope_theta` and `partial_rotary_factor`.

    Args:
        fields: the whole config.
        head_dim: dimensions of a head.
        default_partial: the family's share of rotated dimensions; None if the family always rotates whole heads.
        default_theta: what an absent rope_theta means.

    Raises:
        CheckpointError: a type or value that is not supported.
    """
    # The older spelling wins where a config carries both, and what the section lacks is looked up at the top.
    section = fields.section("rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters")
    if any(isinstance(value, dict) for value in section.values.values()):
        raise section.error("rope parameters", section.values, "one set for all layers; sets per layer type are not"
                            " supported")  # fmt: skip
    type_name = "rope_type" if "rope_type" in section else "type"
    rope_type = section.choice(type_name, _TYPES, "default")
    theta = _first(section, fields, "rope_theta").number("rope_theta", default_theta)
    rotary_dim = _read_rotary_dim(_first(section, fields, "partial_rotary_factor"), head_dim, default_partial)
    base = RopeConfig(rotary_dim, theta)
    if rope_type == "default":
        return base
    if rope_type == "linear":
        return RopeConfig(rotary_dim, theta, rope_type, factor=section.number("factor"))
    length = _original_length(section, fields)
    if rope_type == "llama3":
        low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
        return RopeConfig(rotary_dim, theta, rope_type, section.number("factor"), length, low, high)
    return _read_yarn(section, fields, base, length)


def _first(section: ConfigFields, fields: ConfigFields, name: str) -> ConfigFields:
    return section if name in section else fields


def _read_rotary_dim(owner: ConfigFields, head_dim: int, default_partial: float | None) -> int:
    name = "partial_rotary_factor"
    partial = owner.number(name, 1.0 if default_partial is None else default_partial)
    if default_partial is None and partial != 1.0:
        raise owner.error(name, partial, "1 in this family")
    rotary_dim = int(head_dim * partial)
    if partial > 1.0 or rotary_dim < 2 or rotary_dim % 2:
        raise owner.error(name, partial, f"an even part of head_dim={head_dim}")
    return rotary_dim


def _original_length(section: ConfigFields, fields: ConfigFields) -> float:
    name = "original_max_position_embeddings"
    owner = fields if name in fields else section
    return owner.number(name, fields.number("max_position_embeddings"))


def _read_yarn(section: ConfigFields, fields: ConfigFields, base: RopeConfig, length: float) -> RopeConfig:
    factor = section.number("factor", fields.number("max_position_embeddings") / length)
    if "attention_factor" in section:
        attention_factor = section.number("attention_factor")
    elif "mscale" in section and "mscale_all_dim" in section:
        attention_factor = _yarn_scale(factor, section.number("mscale"))
        attention_factor /= _yarn_scale(factor, section.number("mscale_all_dim"))
    else:
        attention_factor = _yarn_scale(factor, 1.0)
    return RopeConfig(
        base.rotary_dim,
        base.theta,
        "yarn",
        factor,
        length,
        low=section.number("beta_slow", 1.0),
        high=section.number("beta_fast", 32.0),
        attention_factor=attention_factor,
        truncate=section.flag("truncate", True),
    )


def _yarn_scale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _frequencies(config: RopeConfig) -> Tensor:
    """Return radians per token of each rotated pair, `[rotary_dim / 2]` float32, on the ambient device."""
    exponent = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    plain = 1.0 / (config.theta**exponent)
    if config.rope_type == "linear":
        return plain / config.factor
    if config.rope_type == "llama3":
        return _llama3_frequencies(config, plain)
    if config.rope_type == "yarn":
        return _yarn_frequencies(config, plain)
    return plain


def _llama3_frequencies(config: RopeConfig, plain: Tensor) -> Tensor:
    """Stretch slow frequencies by the factor, keep fast ones, blend between the two."""
    turns = config.original_length * plain / (2 * math.pi)
    blend = ((turns - config.low) / (config.high - config.low)).clamp(0.0, 1.0)
    return (1.0 - blend) * plain / config.factor + blend * plain


def _yarn_frequencies(config: RopeConfig, plain: Tensor) -> Tensor:
    """Stretch pairs that turn slowly in the original length, keep fast ones, ramp between the two by dimension."""

    def dimension(turns: float) -> float:
        ratio = config.original_length / (turns * 2 * math.pi)
        return config.rotary_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension(config.high), dimension(config.low)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(config.rotary_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return plain / config.factor * ramp + plain * (1.0 - ramp)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of a step's positions; made once per step and shared by all layers."""

    frequencies: Tensor

    def __init__(self, config: RopeConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.attention_factor = config.attention_factor
        self.register_buffer("frequencies", _frequencies(config), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, each `[T, 1, rotary_dim / 2]`, of positions `[T]`."""
        angles = (positions.float()[:, None] * self.frequencies)[:, None]
        scale = self.attention_factor
        return (angles.cos() * scale).to(self.dtype), (angles.sin() * scale).to(self.dtype)


def apply_rotary(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the leading `rotary_dim` dimensions of `[T, H, D]`, first half against second; the rest pass."""
    cosine, sine = rotation
    half = cosine.shape[-1]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine, rest), dim=-1)
