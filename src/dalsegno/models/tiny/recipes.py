"""How strongly the parts of a tiny model of each family speak: standard deviations of its random weights.

A gain is the standard deviation of what a linear map gives for an input of unit size. Too little from the mixers, and
the answer echoes the last token whatever the caches hold; too much, and every answer runs into the same few tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["MambaSizes", "Recipe", "mamba_sizes", "recipe_of"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Scales of one family.

    Attributes:
        gains: by the name of the tensor's module, such as "q_proj"; a name with its parent's, such as
            "self_attn.out_proj", comes first.
        centred_norms: norms are stored as their distance from one.
        embedding: standard deviation of the embedding.
    """

    gains: Mapping[str, float]
    centred_norms: bool = False
    embedding: float = 1.0


_DENSE = {
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
_DELTA = _DENSE | {
    "o_proj": 3.0,
    "down_proj": 0.5,
    "in_proj_qkvz": 1.0,
    "in_proj_ba": 0.32,
    "in_proj_qkv": 1.0,
    "in_proj_z": 1.0,
    "in_proj_b": 0.32,
    "in_proj_a": 0.32,
    "conv1d": 1.0,
    "out_proj": 1.5,
    "shared_expert_gate": 1.0,
}
# The parts of in_proj: keys and queries stay in the linear part of SiLU, as in a gated delta net. Loud ones, all of one
# sign behind SiLU, would read the mean of all values, in which a few tokens more or less do not show.
_MAMBA = _DENSE | {
    "o_proj": 4.0,
    "down_proj": 0.5,
    "conv1d": 1.0,
    "out_proj": 3.0,
    "gate": 1.0,
    "value": 1.0,
    "key": 0.5,
    "query": 0.5,
    "step": 0.3,
}
_GRANITE = _MAMBA | {"input_linear": 1.0, "output_linear": 1.0, "out_proj": 6.0, "o_proj": 12.0, "lm_head": 6.0}
_LFM2 = _DENSE | {
    "in_proj": 1.0,
    "conv": 1.0,
    "out_proj": 1.5,
    "w1": 1.0,
    "w3": 1.0,
    "w2": 0.5,
    "self_attn.out_proj": 3.0,
}

_RECIPES = {
    "bamba": Recipe(_MAMBA),
    "falcon_h1": Recipe(_MAMBA | {"o_proj": 8.0}),
    "granitemoehybrid": Recipe(_GRANITE, embedding=0.25),
    "lfm2": Recipe(_LFM2),
    "nemotron_h": Recipe(_MAMBA),
    "qwen3_5_text": Recipe(_DELTA, centred_norms=True),
    "qwen3_5_moe_text": Recipe(_DELTA, centred_norms=True),
    "qwen3_next": Recipe(_DELTA, centred_norms=True),
}


def recipe_of(config: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a config.json's family; a family of attention alone has the common one."""
    return _RECIPES.get(config["model_type"], Recipe(_DENSE))


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """Rows of in_proj in a Mamba2 layer: gate and values `inner` each, keys and queries `group` each, steps `heads`."""

    inner: int
    group: int
    heads: int


def mamba_sizes(config: Mapping[str, Any]) -> MambaSizes:
    """Return the sizes of a family's Mamba2 layers."""
    if config["model_type"] == "nemotron_h":
        heads, state = config["mamba_num_heads"], config["ssm_state_size"]
        return MambaSizes(heads * config["mamba_head_dim"], config["n_groups"] * state, heads)
    heads, state = config["mamba_n_heads"], config["mamba_d_state"]
    return MambaSizes(heads * config["mamba_d_head"], config["mamba_n_groups"] * state, heads)
