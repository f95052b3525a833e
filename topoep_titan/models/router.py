"""The routers of the published models: how groups are scored, and the auxiliary losses.

The loss of one layer in one step is ``aux_scale * mean over tokens t of sum_x f_x * p_tx``, where
p_tx is the score of expert x, normalised over the experts, and f_x = E * (assignments of x) / (K *
tokens) within the scope: the token's own sequence (DeepSeek-V2, arXiv:2405.04434, section 2.2.3,
equations 23 to 25), or the microbatch of all data-parallel ranks (the global-batch loss of Qwen3).
f has no gradient, so the loss is linear in p, and each rank may add its own tokens' part: what
ranks exchange is counts.

DeepSeek-V2 adds two losses over devices, its groups of experts. They have the same form, with f of
an expert replaced by a value of its group g: ``device_scale`` with the mean of f over g (equations
26 to 28), ``communication_scale`` with (groups / groups kept) * (tokens that chose g) / tokens
(equations 29 to 31).

It enters through the routing weights: forward leaves them alone, backward adds the loss's gradient.
So it needs no path to the model's output, which is what pipeline stages, gradient accumulation and
activation checkpointing want.

Letters: B batch, L sequence, D width, E experts, K top-k, G groups of experts.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.moe import TokenChoiceTopKRouter


class BalancedRouter(TokenChoiceTopKRouter):
    """torchtitan's router with the group score and the auxiliary loss of its family.

    ``aux_sum`` adds up the loss that this rank contributed, until it is read and set to zero.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        group_score: Literal["max", "top2_sum"] = "top2_sum"
        aux_scope: Literal["sequence", "batch"] = "sequence"
        aux_scale: float = 0.0
        """0: no auxiliary loss."""
        device_scale: float = 0.0
        communication_scale: float = 0.0
        """Of the losses over groups, beside ``aux_scale``."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.group_score = config.group_score
        self.aux_scope, self.aux_scale = config.aux_scope, config.aux_scale
        self.device_scale = config.device_scale
        self.communication_scale = config.communication_scale
        self.aux_sum = 0.0
        self.tokens_per_step: int | None = None
        self.share = 1.0
        self.groups: list[dist.ProcessGroup] = []

    def _get_node_limited_routing_scores(self, scores_for_choice_BLE: Tensor) -> Tensor:
        """-inf outside the groups kept. DeepSeek-V2 scores a group by its best expert (section
        2.2.2), DeepSeek-V3 and GLM-4.5 by the sum of its two best."""
        if self.group_score == "top2_sum":
            return super()._get_node_limited_routing_scores(scores_for_choice_BLE)
        grouped = scores_for_choice_BLE.unflatten(-1, (self.num_expert_groups, -1))
        kept = grouped.amax(-1).topk(self.num_limited_groups, dim=-1).indices
        dropped = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, kept, False)
        return grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)

    def forward(
        self, x_BLD: Tensor, expert_bias_E: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights_BLK, ids_BLK, scores_BLE = super().forward(x_BLD, expert_bias_E)
        if self.aux_scale and self.training and torch.is_grad_enabled():
            loss = self._aux_loss(scores_BLE, ids_BLK)
            # Activation checkpointing runs forward again inside backward: count the first run only.
            if torch._C._current_graph_task_id() == -1:
                self.aux_sum += loss.detach()
            weights_BLK = _AddGradient.apply(weights_BLK, loss)
        return weights_BLK, ids_BLK, scores_BLE

    def _aux_loss(self, scores_BLE: Tensor, ids_BLK: Tensor) -> Tensor:
        """This rank's part of the step's loss, from one microbatch."""
        if self.tokens_per_step is None:
            raise RuntimeError("call connect_routers() before training with an auxiliary loss")
        if self.score_func == "sigmoid":  # DeepSeek-V3, equation 19; a softmax sums to one already
            scores_BLE = scores_BLE / scores_BLE.sum(-1, keepdim=True)
        counts = _counts(ids_BLK, self.num_experts)
        if self.communication_scale:
            counts = torch.cat([counts, self._tokens_of_groups(ids_BLK)], dim=1)
        if self.aux_scope == "batch":
            counts = counts.sum(0, keepdim=True)
        for group in self.groups:
            dist.all_reduce(counts, group=group)
        weight_BE = self._expert_weights(counts.to(scores_BLE.dtype))
        loss = (scores_BLE.sum(1) * weight_BE).sum() / self.tokens_per_step
        return self.share * loss

    def _expert_weights(self, counts: Tensor) -> Tensor:
        """(B, E): what a unit of p_x costs, from counts (B, E) or (B, E + G)."""
        count_BE, reached_BG = counts.split(
            [self.num_experts, counts.shape[1] - self.num_experts], 1
        )
        tokens_B1 = count_BE.sum(-1, keepdim=True) / self.top_k
        frequency_BE = self.num_experts * count_BE / (self.top_k * tokens_B1)
        weight_BE = self.aux_scale * frequency_BE
        if self.device_scale:
            mean_BG = frequency_BE.unflatten(-1, (self.num_expert_groups, -1)).mean(-1)
            weight_BE = weight_BE + self.device_scale * self._spread(mean_BG)
        if self.communication_scale:
            share = self.num_expert_groups / self.num_limited_groups
            sent_BG = share * reached_BG / tokens_B1
            weight_BE = weight_BE + self.communication_scale * self._spread(sent_BG)
        return weight_BE

    def _tokens_of_groups(self, ids_BLK: Tensor) -> Tensor:
        """(B, G): tokens with at least one expert in the group."""
        group_BLK = ids_BLK // (self.num_experts // self.num_expert_groups)
        reached_BLG = group_BLK.new_zeros(*ids_BLK.shape[:2], self.num_expert_groups)
        return reached_BLG.scatter_(-1, group_BLK, 1).sum(1)

    def _spread(self, value_BG: Tensor) -> Tensor:
        """Each expert its group's value."""
        return value_BG.repeat_interleave(self.num_experts // self.num_expert_groups, dim=-1)


def _counts(ids_BLK: Tensor, num_experts: int) -> Tensor:
    """int64 (B, E): assignments of each expert in each sequence."""
    chosen = ids_BLK.flatten(1)
    counts = chosen.new_zeros(chosen.shape[0], num_experts)
    return counts.scatter_add_(1, chosen, torch.ones_like(chosen))


class _AddGradient(torch.autograd.Function):
    """Passes ``values`` on; in backward, ``loss`` gets the gradient that a summand would get."""

    @staticmethod
    def forward(ctx, values: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_dtype = loss.dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), dtype=ctx.loss_dtype, device=gradient.device)


def connect_routers(
    model_parts: list[nn.Module], parallel_dims: ParallelDims, *, tokens_per_step: int
) -> None:
    """Tell every router how many tokens one step has over all ranks, and who else counts them."""
    tensor = parallel_dims.get_optional_mesh("tp")
    data = parallel_dims.get_optional_mesh("loss")
    for router in routers(model_parts):
        router.tokens_per_step = tokens_per_step
        # With expert parallelism a tensor-parallel rank routes its slice of each sequence; without,
        # every one routes all of it, and the gradients of its router add up.
        router.groups, router.share = [], 1.0
        if tensor is not None and parallel_dims.ep_enabled:
            router.groups.append(tensor.get_group())
        elif tensor is not None:
            router.share = 1.0 / tensor.size()
        if data is not None and router.aux_scope == "batch":
            router.groups.append(data.get_group())


def routers(model_parts: list[nn.Module]) -> list[BalancedRouter]:
    return [
        module
        for part in model_parts
        for module in part.modules()
        if isinstance(module, BalancedRouter)
    ]
