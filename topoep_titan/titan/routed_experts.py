"""torchtitan's RoutedExperts, executed by our plans; installed through its ``@override`` door."""

import dataclasses
import functools
import inspect
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

from topoep_titan.cluster import Cluster, ModelDims, load_cluster
from topoep_titan.execution.deepep import PLANNED_AS
from topoep_titan.execution.experts import PLAIN
from topoep_titan.execution.float8 import FLOAT8
from topoep_titan.execution.lane import make_lane
from topoep_titan.execution.layer import Engine, LayerRecord, run_layer
from topoep_titan.execution.loopback import Loopback
from topoep_titan.execution.one_sided import ONE_SIDED, make_transport
from topoep_titan.execution.transport import Transport
from topoep_titan.placement.statistics import SetSample
from topoep_titan.planning import DevicePlanner, make_planner, planner_named
from topoep_titan.planning.plan import contiguous_mains
from topoep_titan.titan.config import used_slots
from topoep_titan.titan.deepep import buffer_opener

# One engine for all layers with the same expert-parallel group and settings; it lives as long as
# the layers do.
_ENGINES: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


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
        float8: bool
        dispatcher: str
        transport: str
        chunks: int
        balance_weight: int | None
        record_trace: bool
        verify_plan: bool

    def __init__(self, config: Config):
        super().__init__(config)
        self.config = config
        self.records: list[LayerRecord] = []
        self.trace: list[Tensor] = []  # int16 (T, K) of each microbatch, with record_trace
        self.sample: SetSample | None = None  # of expert sets, for the next placement
        self.last_ids_TK: Tensor | None = None  # of the last training call
        self._connect(None)

    def parallelize(self, parallel_dims) -> None:
        super().parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("ep")
        if mesh is not None:
            self._connect(mesh.get_group())

    def keep_sample(self, sample: SetSample) -> None:
        """Sample the expert sets of every training call from now on, and add up the load."""
        self.sample = sample
        self.load_E = torch.zeros(self.main_E.numel(), dtype=torch.int64)

    def _connect(self, group) -> None:
        config, experts = self.config, self.config.inner_experts
        ranks = 1 if group is None else group.size()
        self.group = group
        with torch.device("cpu"):  # torchtitan builds models on the meta device
            self.main_E = contiguous_mains(ranks, experts.num_experts)
        self.dims = ModelDims(experts.dim, experts.hidden_dim)
        self.cluster: Cluster = load_cluster(config.cluster).resized(
            ranks, min(config.ranks_per_node, ranks)
        )

    @functools.cached_property
    def engine(self) -> Engine:
        """Made at first use: pipeline parallelism copies the model before it is connected."""
        config = self.config
        settings = (
            config.planner, config.replica_slots, self.cluster, config.expert_dtype,
            config.float8, config.dispatcher, config.transport, config.chunks,
            config.balance_weight, config.verify_plan,
        )  # fmt: skip
        key = (self.group and self.group.group_name, len(self.main_E), self.dims, settings)
        engine = _ENGINES.get(key)
        if engine is None:
            engine = _ENGINES[key] = self._make_engine()
        self.shared_engine = engine  # alive for other layers after this one adopts a copy
        return engine

    @property
    def transport(self) -> Transport:
        return self.engine.transport

    def _make_engine(self) -> Engine:
        config = self.config
        unproven = {config.transport, config.dispatcher} & {*ONE_SIDED, "deepep"}
        if unproven and device_type == "cuda":
            logger.warning(f"{', '.join(sorted(unproven))}: not yet run on a GPU by its authors")
        return Engine(
            planner=self._planner(),
            main_E=self.main_E,
            replica_slots=self._slots(),
            dispatcher=config.dispatcher,
            chunks=config.chunks,
            compute_dtype=getattr(torch, config.expert_dtype),
            transport=(
                Loopback().transport()
                if self.group is None
                else make_transport(config.transport, self.group, self.cluster.ranks_per_node)
            ),
            lane=make_lane(torch.device(device_type)),
            matmuls=FLOAT8 if config.float8 else PLAIN,
            verify_plan=config.verify_plan,
            open_buffer=buffer_opener(self.group) if config.dispatcher == "deepep" else None,
        )

    def _slots(self) -> int:
        return used_slots(self.config.planner, self.config.replica_slots, self.cluster.ranks)

    def _planner(self):
        config = self.config
        options = {}
        takes_weight = (
            "balance_weight" in inspect.signature(planner_named(config.planner)).parameters
        )
        if takes_weight and config.balance_weight is not None:
            options["balance_weight"] = config.balance_weight
        device = torch.device(device_type)
        planner = make_planner(
            config.planner,
            PLANNED_AS if config.dispatcher == "deepep" else config.dispatcher,
            main_E=self.main_E,
            cluster=self.cluster,
            model_dims=self.dims,
            replica_slots=self._slots(),
            device=device,
            **options,
        )
        if device.type == "cuda" and not isinstance(planner, DevicePlanner):
            logger.info(f"The host plans: {config.planner} with {config.dispatcher}")
        return planner

    def adopt(self, main_E: Tensor) -> None:
        """From the next call on, expert x is on rank ``main_E[x]``; its rows must lie there."""
        engine = self.engine
        self.main_E = main_E
        # Transport, lane and buffers stay those of all layers.
        self.engine = dataclasses.replace(engine, planner=self._planner(), main_E=main_E)

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
        first = self.engine.buffers is None
        ids_TK = topk_expert_ids_BLK.flatten(0, 1)
        out_TD, record = run_layer(
            x_BLD.flatten(0, 1),
            topk_scores_BLK.flatten(0, 1),
            ids_TK,
            num_local_tokens_per_expert_E,
            weights,
            self.engine,
            layer=id(self),
        )
        if first:
            _log_memory(self.engine, self.dims)
        # Activation checkpointing runs forward again inside backward: count the first run only.
        recomputing = torch._C._current_graph_task_id() != -1
        if self.training and not recomputing:
            self.records.append(record)
            self.last_ids_TK = ids_TK
            if self.sample is not None:
                self.sample.add(ids_TK)
                self.load_E += record.load_RE.sum(0)
            if self.config.record_trace:
                self.trace.append(ids_TK.to(torch.int16))
        return out_TD.view(x_BLD.shape)


def routed_layers(
    model_parts: list[nn.Module],
) -> Iterator[tuple[int, ReplicatedRoutedExperts]]:
    """(number, routed experts) of each MoE layer on this rank."""
    for part in model_parts:
        for name, module in part.named_modules():
            if isinstance(module, ReplicatedRoutedExperts):
                yield int(re.search(r"layers\.(\d+)\.", name).group(1)), module


def _log_memory(engine: Engine, dims: ModelDims) -> None:
    buffers, mib = engine.buffers, 2**20
    parts = {"mains": buffers.mains or ()} | {
        name: getattr(buffers, name) for name in ("slots", "staging", "regions")
    }
    sizes = ", ".join(
        f"{name} {sum(tensor.nbytes for tensor in tensors) / mib:.1f}"
        for name, tensors in parts.items()
    )
    logger.info(
        f"Expert balancing holds {buffers.nbytes:,} bytes a rank (MiB: {sizes}) for all layers; "
        f"one expert is {dims.expert_bytes // 2 * engine.compute_dtype.itemsize:,} bytes"
    )


@override(target=RoutedExperts.Config, exact=True, description="plan-driven expert replicas")
def replicated(config: RoutedExperts.Config, **settings) -> ReplicatedRoutedExperts.Config:
    return derive(config, ReplicatedRoutedExperts.Config, **settings)
