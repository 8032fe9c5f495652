"""Mixture of experts with a shared expert, without a host sync and without a loop over tokens.

Tokens are sorted by expert and each expert's matrix meets its own tokens in one grouped product, so the cost is that
of the chosen experts for one token as for thousands. Sums run in a fixed order: a token's result depends on no other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dalsegno.models.layers import GatedMLP, Linear, empty_parameter
from dalsegno.models.weights import WeightTarget

__all__ = ["MixtureConfig", "MixtureOfExperts"]


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """Shape of a mixture; `normalise_top` makes the chosen experts' weights add up to one."""

    hidden_size: int
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int
    normalise_top: bool


class MixtureOfExperts(nn.Module):
    """Top-k routed experts plus one shared expert behind a sigmoid gate."""

    expert_ids: Tensor

    def __init__(self, config: MixtureConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        experts, hidden, size = config.num_experts, config.hidden_size, config.intermediate_size
        # One matrix for both gates: the rows are the experts' scores, then the shared expert's gate.
        self.gates = Linear(hidden, experts + 1, dtype)
        self.gate_up = empty_parameter(experts, 2 * size, hidden, dtype=dtype)
        self.down = empty_parameter(experts, hidden, size, dtype=dtype)
        self.shared_expert = GatedMLP(hidden, config.shared_intermediate_size, dtype)
        self.register_buffer("expert_ids", torch.arange(experts), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[T, hidden] -> [T, hidden]`."""
        scores, shared_gate = self.gates(hidden).split((self.config.num_experts, 1), dim=-1)
        weights, experts = torch.topk(scores.softmax(-1, dtype=torch.float32), self.config.experts_per_token, dim=-1)
        if self.config.normalise_top:
            weights = weights / weights.sum(-1, keepdim=True)
        shared: Tensor = shared_gate.sigmoid() * self.shared_expert(hidden)
        return shared + self._routed(hidden, experts, weights.to(hidden.dtype))

    def _routed(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts; `experts` and `weights` are `[T, k]`."""
        flat, order = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(flat, self.expert_ids, right=True).int()
        rows = hidden[order // self.config.experts_per_token]
        gate, up = functional.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        rows = functional.grouped_mm(functional.silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        outputs = torch.empty_like(rows)
        outputs[order] = rows
        outputs = outputs.view(*weights.shape, -1) * weights[..., None]
        return outputs.sum(1)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        """Return router, experts one by one, shared expert and its gate."""
        size = self.config.intermediate_size
        targets = {
            **self.gates.weight_targets({f"{prefix}.gate": self.config.num_experts, f"{prefix}.shared_expert_gate": 1}),
            **self.shared_expert.weight_targets(f"{prefix}.shared_expert"),
        }
        for index in range(self.config.num_experts):
            expert = f"{prefix}.experts.{index}"
            targets[f"{expert}.gate_proj.weight"] = WeightTarget(self.gate_up[index, :size])
            targets[f"{expert}.up_proj.weight"] = WeightTarget(self.gate_up[index, size:])
            targets[f"{expert}.down_proj.weight"] = WeightTarget(self.down[index])
        return targets
