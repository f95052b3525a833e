"""The tables of a recipe that are ours: ``[topoep]`` and a flat ``[optimizer]``."""

from dataclasses import dataclass
from typing import Any, Literal

from torchtitan.components.optimizer import OptimizersContainer, default_adamw

from topoep_titan.titan.device import local_ranks, on_cpu


@dataclass(kw_only=True, slots=True)
class TopoEPConfig:
    planner: str = "topoep"
    """Name in topoep_titan.planning.PLANNERS."""

    replica_slots: int = 2
    """S: replica slots a rank."""

    dispatcher: Literal["alltoall", "dedup", "dedup-node", "deepep"] = "alltoall"
    """How tokens travel: a row per assignment, per (token, rank), per (token, node) and then per
    rank of it. "deepep": DeepEP moves them (CUDA, not yet run)."""

    transport: Literal["auto", "collective", "symm_mem", "gin"] = "auto"
    """How expert copies travel. "collective": gloo or NCCL. "symm_mem": within a node by kernels
    over peer-mapped memory (CPU: shared memory), between nodes as "collective". "gin": between
    nodes by the network card. Neither was run on a GPU yet. "auto": collective."""

    chunks: Literal[1, 2] = 1
    """Chunks of the token pipeline: with 2, one chunk travels while the other is computed."""

    cluster: str = "auto"
    """Rates that planners price with: a name in toml_configs/clusters or a .toml file.
    "auto": cpu_local on CPU, h800_4x8 on CUDA."""

    ranks_per_node: int | None = None
    """Ranks of one NVLink domain. Default: the ranks that torchrun starts on a machine. A smaller
    value emulates several domains on one machine."""

    balance_weight: int | None = None
    """Per cent of the compute term that planners which trade balance for traffic add to it.
    Default: the planner's own. Planners without such a trade ignore it."""

    record_trace: bool = False
    """Keep every step's routing in trace/step-*.npz, for the simulator."""

    verify_plan: bool = False
    """Compare a hash of every plan over the ranks, and stop all of them when it differs."""

    router_skew: float | None = None
    """Synthetic routing for performance runs: standard deviation of a fixed expert bias (the sign
    does not matter; the paper writes it negative). Default: the model's own (natural) routing."""

    expert_dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Compute dtype of the experts; replicas travel in it."""


def expert_settings(topoep: TopoEPConfig, converters: list[str]) -> dict[str, Any]:
    """What ``routed_experts.replicated`` takes of the table, and of ``converters``."""
    return {
        "planner": topoep.planner,
        "replica_slots": topoep.replica_slots,
        "cluster": cluster_name(topoep.cluster),
        "ranks_per_node": topoep.ranks_per_node or local_ranks() or 1,
        "expert_dtype": topoep.expert_dtype,
        "float8": "float8_experts" in converters,
        "dispatcher": topoep.dispatcher,
        "transport": topoep.transport,
        "chunks": topoep.chunks,
        "balance_weight": topoep.balance_weight,
        "record_trace": topoep.record_trace,
        "verify_plan": topoep.verify_plan,
    }


def used_slots(planner: str, replica_slots: int, ranks: int) -> int:
    """Slots that are allocated: without a planner that fills them, or another rank to copy from,
    they would stay empty."""
    return replica_slots if ranks > 1 and planner != "none" else 0


def cluster_name(configured: str) -> str:
    if configured != "auto":
        return configured
    return "cpu_local" if on_cpu() else "h800_4x8"


class AdamW(OptimizersContainer):
    """torchtitan's optimizer container with one AdamW group whose settings a recipe can name."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        lr: float = 3e-4
        beta1: float = 0.9
        beta2: float = 0.95
        eps: float = 1e-8
        weight_decay: float = 0.1

        def __post_init__(self):
            self.param_groups = default_adamw(
                lr=self.lr,
                betas=(self.beta1, self.beta2),
                eps=self.eps,
                weight_decay=self.weight_decay,
            ).param_groups
