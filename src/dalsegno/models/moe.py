"""Mixture of experts with a shared expert: which experts a token meets, and the matrices of all."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dalsegno.models.layers import GatedMLP, Linear, empty_parameter
from dalsegno.models.weights import FusedTensor, WeightTarget
from dalsegno.ops.experts import routed_experts

__all__ = ["Experts", "MixtureConfig", "MixtureOfExperts"]


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """Shape of a mixture; `normalise_top` makes the chosen experts' weights add up to one."""

    hidden_size: int
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int
    normalise_top: bool


class Experts(nn.Module):
    """The matrices of all experts and their weighted sum for each token.

    An expert is a gated MLP with SiLU, or without `gated` `down(relu(up(x))^2)`.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, intermediate_size: int, dtype: torch.dtype, *, gated: bool = True
    ) -> None:
        super().__init__()
        self.gated = gated
        self.intermediate_size = intermediate_size
        # The rows of a gated expert are its gate, then its up projection.
        rows = 2 * intermediate_size if gated else intermediate_size
        self.up = empty_parameter(num_experts, rows, hidden_size, dtype=dtype)
        self.down = empty_parameter(num_experts, hidden_size, intermediate_size, dtype=dtype)

    def forward(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return `[T, hidden]`, the weighted sum of each token's experts; `experts` and `weights` are `[T, k]`."""
        return routed_experts(hidden, experts, weights, self.up, self.down, gated=self.gated)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        """Return the projections expert by expert."""
        size = self.intermediate_size
        targets: dict[str, WeightTarget] = {}
        for index, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            if self.gated:
                targets[f"{prefix}.{index}.gate_proj.weight"] = WeightTarget(up[:size])
            targets[f"{prefix}.{index}.up_proj.weight"] = WeightTarget(up[-size:])
            targets[f"{prefix}.{index}.down_proj.weight"] = WeightTarget(down)
        return targets

    def fused_tensors(self, prefix: str) -> dict[str, FusedTensor]:
        """Return the two tensors that hold all experts' projections."""
        names = self.weight_targets(prefix)
        down = tuple(name for name in names if name.endswith("down_proj.weight"))
        up = tuple(name for name in names if name not in down)
        return {
            f"{prefix}.{'gate_up_proj' if self.gated else 'up_proj'}": FusedTensor(WeightTarget(self.up), up),
            f"{prefix}.down_proj": FusedTensor(WeightTarget(self.down), down),
        }


class MixtureOfExperts(nn.Module):
    """Top-k routed experts plus one shared expert behind a sigmoid gate."""

    def __init__(self, config: MixtureConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        # One matrix for both gates: the rows are the experts' scores, then the shared expert's gate.
        self.gates = Linear(config.hidden_size, config.num_experts + 1, dtype)
        self.experts = Experts(config.hidden_size, config.num_experts, config.intermediate_size, dtype)
        self.shared_expert = GatedMLP(config.hidden_size, config.shared_intermediate_size, dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[T, hidden] -> [T, hidden]`."""
        scores, shared_gate = self.gates(hidden).split((self.config.num_experts, 1), dim=-1)
        weights, experts = torch.topk(scores.softmax(-1, dtype=torch.float32), self.config.experts_per_token, dim=-1)
        if self.config.normalise_top:
            weights = weights / weights.sum(-1, keepdim=True)
        shared: Tensor = shared_gate.sigmoid() * self.shared_expert(hidden)
        routed: Tensor = self.experts(hidden, experts, weights.to(hidden.dtype))
        return shared + routed

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        """Return router, experts one by one, shared expert and its gate."""
        return {
            **self.gates.weight_targets({f"{prefix}.gate": self.config.num_experts, f"{prefix}.shared_expert_gate": 1}),
            **self.shared_expert.weight_targets(f"{prefix}.shared_expert"),
            **self.experts.weight_targets(f"{prefix}.experts"),
        }

    def fused_tensors(self, prefix: str) -> dict[str, FusedTensor]:
        """Return the experts' tensors in one piece."""
        return self.experts.fused_tensors(f"{prefix}.experts")
