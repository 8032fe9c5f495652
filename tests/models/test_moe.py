"""The grouped mixture equals a loop over tokens and experts, and a token's result depends on no other token."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dalsegno.models.moe import MixtureConfig, MixtureOfExperts


def _mixture(num_experts: int, experts_per_token: int, *, normalise_top: bool) -> MixtureOfExperts:
    config = MixtureConfig(20, num_experts, experts_per_token, 12, 28, normalise_top)
    mixture = MixtureOfExperts(config, torch.float32)
    source = torch.Generator().manual_seed(num_experts)
    for parameter in mixture.parameters():
        parameter.normal_(0, 0.5, generator=source)
    return mixture


def _naive(mixture: MixtureOfExperts, hidden: Tensor) -> Tensor:
    config, targets = mixture.config, {name: t.destination for name, t in mixture.weight_targets("m").items()}

    def expert(prefix: str, token: Tensor) -> Tensor:
        gate, up = targets[f"{prefix}.gate_proj.weight"] @ token, targets[f"{prefix}.up_proj.weight"] @ token
        return targets[f"{prefix}.down_proj.weight"] @ (functional.silu(gate) * up)

    rows = []
    for token in hidden:
        probabilities = (targets["m.gate.weight"] @ token).softmax(0)
        weights, chosen = probabilities.topk(config.experts_per_token)
        if config.normalise_top:
            weights = weights / weights.sum()
        row = (targets["m.shared_expert_gate.weight"] @ token).sigmoid() * expert("m.shared_expert", token)
        for weight, index in zip(weights, chosen.tolist(), strict=True):
            row = row + weight * expert(f"m.experts.{index}", token)
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("normalise_top", [True, False])
@pytest.mark.parametrize(("num_experts", "experts_per_token"), [(1, 1), (4, 2), (7, 3), (5, 5), (40, 2)])
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_mixture_equals_the_naive_loop(
    num_experts: int, experts_per_token: int, num_tokens: int, normalise_top: bool
) -> None:
    mixture = _mixture(num_experts, experts_per_token, normalise_top=normalise_top)
    hidden = torch.randn(num_tokens, 20, generator=torch.Generator().manual_seed(num_tokens))
    torch.testing.assert_close(mixture(hidden), _naive(mixture, hidden), rtol=1e-4, atol=1e-4)


def test_a_token_of_nan_spoils_no_other() -> None:
    mixture = _mixture(4, 2, normalise_top=True)
    hidden = torch.randn(9, 20, generator=torch.Generator().manual_seed(1))
    expected = mixture(hidden)
    hidden[4] = float("nan")
    found = mixture(hidden)
    others = torch.arange(9) != 4
    torch.testing.assert_close(found[others], expected[others], rtol=1e-5, atol=1e-5)
