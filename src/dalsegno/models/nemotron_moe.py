"""Feed-forward parts of NemotronH: an MLP with a squared ReLU, and experts of that kind routed by groups."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dalsegno.models.layers import Linear, empty_parameter
from dalsegno.models.moe import Experts
from dalsegno.models.weights import FusedTensor, WeightTarget
from dalsegno.ops.linear import linear

__all__ = ["GroupRoutedExperts", "RoutingConfig", "SquaredMLP"]

_SCORED_PER_GROUP = 2


class SquaredMLP(nn.Module):
    """`down(relu(up(x))^2)`."""

    def __init__(self, hidden_size: int, intermediate_size: int, dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__()
        self.up_proj = Linear(hidden_size, intermediate_size, dtype, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, dtype, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[T, hidden] -> [T, hidden]`."""
        output: Tensor = self.down_proj(functional.relu(self.up_proj(hidden)).square())
        return output

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        """Return up and down projections."""
        return {
            **self.up_proj.weight_targets({f"{prefix}.up_proj": self.up_proj.weight.shape[0]}),
            **self.down_proj.weight_targets({f"{prefix}.down_proj": self.down_proj.weight.shape[0]}),
        }

    def fused_tensors(self, prefix: str) -> dict[str, FusedTensor]:
        """Return nothing: there is one spelling."""
        return {}


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """Shape of routed experts.

    Attributes:
        latent_size: width of what experts see, through a projection in and one out; None is the hidden size.
        num_groups: experts are in this many groups of equal size; a token's experts are from `groups_per_token` ones.
        normalise_top: makes the chosen experts' weights add up to one, before `scale`.
        scale: factor on the weights.
    """

    hidden_size: int
    latent_size: int | None
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int
    num_groups: int
    groups_per_token: int
    normalise_top: bool
    scale: float


class GroupRoutedExperts(nn.Module):
    """Experts chosen by sigmoid scores plus a bias that their weights do not see, and a shared expert.

    The router is float32 in any dtype.
    """

    def __init__(self, config: RoutingConfig, dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__()
        self.config = config
        width = config.latent_size or config.hidden_size
        self.router = empty_parameter(config.num_experts, config.hidden_size, dtype=torch.float32)
        self.choice_bias = empty_parameter(config.num_experts, dtype=torch.float32)
        self.experts = Experts(width, config.num_experts, config.intermediate_size, dtype, gated=False)
        self.shared_experts = SquaredMLP(config.hidden_size, config.shared_intermediate_size, dtype, bias=bias)
        has_latent = config.latent_size is not None
        self.latent_in = Linear(config.hidden_size, width, dtype, bias=bias) if has_latent else None
        self.latent_out = Linear(width, config.hidden_size, dtype, bias=bias) if has_latent else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[T, hidden] -> [T, hidden]`."""
        experts, weights = self._route(hidden)
        seen = hidden if self.latent_in is None else self.latent_in(hidden)
        routed: Tensor = self.experts(seen, experts, weights.to(hidden.dtype))
        if self.latent_out is not None:
            routed = self.latent_out(routed)
        shared: Tensor = self.shared_experts(hidden)
        return routed + shared

    def _route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of each token and their weights, `[T, k]` each."""
        config = self.config
        scores = linear(hidden.float(), self.router).sigmoid()
        choice = scores + self.choice_bias
        if config.groups_per_token < config.num_groups:
            grouped = choice.unflatten(-1, (config.num_groups, -1))
            scored = min(_SCORED_PER_GROUP, grouped.shape[-1])
            best = grouped.topk(scored, dim=-1).values.sum(-1).topk(config.groups_per_token, dim=-1).indices
            shut = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
            choice = grouped.masked_fill(shut[..., None], float("-inf")).flatten(1)
        experts = choice.topk(config.experts_per_token, dim=-1).indices
        weights = scores.gather(1, experts)
        if config.normalise_top:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * config.scale

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        """Return router, experts one by one, shared expert and latent projections."""
        targets = {
            f"{prefix}.gate.weight": WeightTarget(self.router),
            f"{prefix}.gate.e_score_correction_bias": WeightTarget(self.choice_bias),
            **self.experts.weight_targets(f"{prefix}.experts"),
            **self.shared_experts.weight_targets(f"{prefix}.shared_experts"),
        }
        for name, latent in (("fc1_latent_proj", self.latent_in), ("fc2_latent_proj", self.latent_out)):
            if latent is not None:
                targets |= latent.weight_targets({f"{prefix}.{name}": latent.weight.shape[0]})
        return targets

    def fused_tensors(self, prefix: str) -> dict[str, FusedTensor]:
        """Return the experts' tensors in one piece."""
        return self.experts.fused_tensors(f"{prefix}.experts")
