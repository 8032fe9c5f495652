"""Reading the config fields that hybrid families share: which layer is of which kind, and the shape of Mamba2 layers.

Old and new spellings mean the same: "mamba" and "linear_attention", "attention" and "full_attention".
"""

from collections.abc import Iterable
from typing import Any

from dalsegno.models.config_fields import ConfigFields
from dalsegno.models.mamba2 import Mamba2Config

__all__ = ["ATTENTION", "STATE", "read_layer_types", "read_mamba2", "read_step_limit"]

STATE, ATTENTION = "linear_attention", "full_attention"
"""Kinds of layers as this module names them, whatever the config's spelling."""

_OLD_SPELLINGS = {"mamba": STATE, "mamba2": STATE, "attention": ATTENTION}
_FIELDS = ("layer_types", "layers_block_type")
_UNLIMITED = (0.0, float("inf"))


def read_layer_types(fields: ConfigFields, num_layers: int | None, others: Iterable[str] = ()) -> list[str] | None:
    """Return the kind of each layer, `STATE`, `ATTENTION` or one of `others`; None where the config has no list.

    Args:
        fields: the whole config.
        num_layers: how many there must be; None is any number.
        others: kinds the family has besides.

    Raises:
        CheckpointError: a list of another length, or another kind.
    """
    name = next((field for field in _FIELDS if field in fields), None)
    if name is None:
        return None
    length = len(fields.require(name)) if num_layers is None else num_layers
    given = fields.strings(name, (STATE, ATTENTION, *_OLD_SPELLINGS, *others), length)
    return [_OLD_SPELLINGS.get(kind, kind) for kind in given]


def read_mamba2(
    fields: ConfigFields, hidden_size: int, norm_eps: float, *, inner_size: int | None = None
) -> Mamba2Config:
    """Read the `mamba_*` fields.

    Args:
        fields: the whole config.
        hidden_size: of the model.
        norm_eps: of the norm inside the layer.
        inner_size: channels of all heads; None is `mamba_expand` times the hidden size.

    Raises:
        CheckpointError: a field that is not supported, or sizes that do not fit each other.
    """
    inner = inner_size or fields.integer("mamba_expand", 2) * hidden_size
    num_heads = fields.integer("mamba_n_heads", 128)
    fields.check_multiple("the inner size of a Mamba2 layer", inner, "mamba_n_heads", num_heads)
    given = fields.values.get("mamba_d_head")
    head_dim = inner // num_heads if given in (None, "auto") else fields.integer("mamba_d_head")
    if head_dim * num_heads != inner:
        raise fields.error("mamba_d_head", given, f"{inner // num_heads} with mamba_n_heads={num_heads}")
    num_groups = fields.integer("mamba_n_groups", 1)
    fields.check_multiple("mamba_n_heads", num_heads, "mamba_n_groups", num_groups)
    bias = fields.flag("mamba_proj_bias", False)
    return Mamba2Config(
        hidden_size=hidden_size,
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_dim=fields.integer("mamba_d_state", 256),
        conv_kernel=fields.integer("mamba_d_conv", 4, minimum=2),
        norm_eps=norm_eps,
        conv_bias=fields.flag("mamba_conv_bias", True),
        in_bias=bias,
        out_bias=bias,
        step_limit=read_step_limit(fields),
    )


def read_step_limit(fields: ConfigFields, name: str = "time_step_limit") -> tuple[float, float]:
    """Return the least and the largest step; absent is no limit."""
    value = fields.values.get(name)
    if value is None:
        return _UNLIMITED
    limits = [_as_number(item) for item in value] if isinstance(value, list) else []
    if len(limits) != 2 or None in limits or not 0 <= (limits[0] or 0) <= (limits[1] or 0):
        raise fields.error(name, value, "two numbers, the first not negative and at most the second")
    return limits[0] or 0.0, limits[1] or 0.0


def _as_number(value: Any) -> float | None:
    # JSON has no infinity: transformers writes {"__float__": "Infinity"}.
    if isinstance(value, dict) and value.get("__float__") == "Infinity":
        return float("inf")
    return None if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
