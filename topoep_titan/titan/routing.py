"""Synthetic routing for performance runs: random logits plus a fixed expert bias, no learning.

Letters: B batch, L sequence, D width, E experts.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torchtitan.config import derive
from torchtitan.models.common import Linear
from torchtitan.models.common.moe import TokenChoiceTopKRouter
from torchtitan.protocols.module import Module


def skew_bias(num_experts: int, router_skew: float, seed: int) -> np.ndarray:
    """float32 (E,): the fixed bias of the standard `skew` workload; zeros when the skew is 0."""
    if router_skew == 0:
        return np.zeros(num_experts, dtype=np.float32)
    rng = np.random.default_rng(seed)
    return rng.normal(0, abs(router_skew), num_experts).astype(np.float32)


def hashed_normals(x_BLD: Tensor, num_experts: int) -> Tensor:
    """Standard normal logits (B, L, E), each token's drawn from the bits of its hidden vector.

    Stateless, so that recomputing a layer under activation checkpointing draws the same logits and
    nothing synchronises with the host.
    """
    bits = x_BLD.detach().float().contiguous().view(torch.int32).to(torch.int64)
    odd_D = 2 * torch.arange(bits.shape[-1], device=bits.device, dtype=torch.int64) + 1
    token_BL = _mix((bits * _mix(odd_D)).sum(-1))
    expert_E = _mix(torch.arange(1, num_experts + 1, device=bits.device, dtype=torch.int64))
    hashed = _mix(token_BL.unsqueeze(-1) ^ expert_E)
    uniform = ((hashed >> 12) & ((1 << 40) - 1)).double().add(0.5) / (1 << 40)  # in (0, 1)
    return (math.sqrt(2) * torch.erfinv(2 * uniform - 1)).float()


def _mix(z: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64 (arithmetic wraps; shifts are made logical)."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * -0x40A7B892E31B1A47
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * -0x6B2FB644ECCEEE15
    return z ^ ((z >> 31) & ((1 << 33) - 1))


class SkewedGate(Linear):
    """Stands in for the router's gate; its weight is kept but gets no gradient."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        router_skew: float
        bias_seed: int

    def __init__(self, config: Config):
        super().__init__(config)
        self.router_skew, self.bias_seed = config.router_skew, config.bias_seed

    def forward(self, input: Tensor) -> Tensor:  # the name is part of torchtitan's sharding
        bias = skew_bias(self.out_features, self.router_skew, self.bias_seed)
        return hashed_normals(input, self.out_features) + torch.from_numpy(bias).to(input.device)


def skew_routers(model_config: Module.Config, router_skew: float, seed: int) -> None:
    """Replace the gate of every router in the model. All layers share one bias (as a negative
    value of Megatron-LM's biased-router option does): the same experts are hot everywhere."""
    for _, router, _, _ in model_config.traverse(TokenChoiceTopKRouter.Config):
        router.gate = derive(
            router.gate, SkewedGate.Config, router_skew=router_skew, bias_seed=seed
        )
