"""torchtitan's RoutedExperts, executed by our plans; installed through its ``@override`` door."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.models.common.moe import RoutedExperts

from topoep_titan.cluster import Cluster, ModelDims, load_cluster
from topoep_titan.execution.layer import LayerRecord, run_layer
from topoep_titan.execution.transport import CollectiveTransport, LoopbackTransport
from topoep_titan.planning import planner_named
from topoep_titan.planning.plan import contiguous_mains


class ReplicatedRoutedExperts(RoutedExperts):
    """Plans, replicates and routes at every call; ``records`` keeps what was planned.

    Letters: B batch, L sequence, D width, K top-k, E experts, T = B*L tokens of this rank.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        planner: str
        replica_slots: int
        cluster: str
        ranks_per_node: int
        expert_dtype: str

    def __init__(self, config: Config):
        super().__init__(config)
        self.config = config
        self.compute_dtype = getattr(torch, config.expert_dtype)
        self.records: list[LayerRecord] = []
        self._connect(LoopbackTransport())

    def parallelize(self, parallel_dims) -> None:
        super().parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("ep")
        if mesh is not None:
            self._connect(CollectiveTransport(mesh.get_group()))

    def _connect(self, transport) -> None:
        experts = self.config.inner_experts
        self.transport = transport
        with torch.device("cpu"):  # torchtitan builds models on the meta device
            self.main_E = contiguous_mains(transport.ranks, experts.num_experts)
        self.dims = ModelDims(experts.dim, experts.hidden_dim)
        self.cluster: Cluster = load_cluster(self.config.cluster).resized(
            transport.ranks, min(self.config.ranks_per_node, transport.ranks)
        )
        self.plan = functools.partial(
            planner_named(self.config.planner),
            main_E=self.main_E,
            cluster=self.cluster,
            model_dims=self.dims,
            replica_slots=self.config.replica_slots,
        )

    # Argument names are part of the contract: torchtitan's sharding is keyed on them.
    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        experts = self.inner_experts
        weights = tuple(
            weight.to_local() if isinstance(weight, DTensor) else weight
            for weight in (experts.w1_EFD, experts.w2_EDF, experts.w3_EFD)
        )
        out_TD, record = run_layer(
            x_BLD.flatten(0, 1),
            topk_scores_BLK.flatten(0, 1),
            topk_expert_ids_BLK.flatten(0, 1),
            num_local_tokens_per_expert_E,
            weights,
            planner=self.plan,
            main_E=self.main_E,
            replica_slots=self.config.replica_slots,
            transport=self.transport,
            compute_dtype=self.compute_dtype,
        )
        # Activation checkpointing runs forward again inside backward: count the first run only.
        recomputing = torch._C._current_graph_task_id() != -1
        if self.training and not recomputing:
            self.records.append(record)
        return out_TD.view(x_BLD.shape)


@override(target=RoutedExperts.Config, exact=True, description="plan-driven expert replicas")
def replicated(
    config: RoutedExperts.Config,
    *,
    planner: str,
    replica_slots: int,
    cluster: str,
    ranks_per_node: int,
    expert_dtype: str,
) -> ReplicatedRoutedExperts.Config:
    return derive(
        config,
        ReplicatedRoutedExperts.Config,
        planner=planner,
        replica_slots=replica_slots,
        cluster=cluster,
        ranks_per_node=ranks_per_node,
        expert_dtype=expert_dtype,
    )
