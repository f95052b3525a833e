"""The tables of a recipe that are ours: ``[topoep]`` and a flat ``[optimizer]``."""

from dataclasses import dataclass
from typing import Literal

from torchtitan.components.optimizer import OptimizersContainer, default_adamw


@dataclass(kw_only=True, slots=True)
class TopoEPConfig:
    planner: str = "topoep"
    """Name in topoep_titan.planning.PLANNERS."""

    replica_slots: int = 2
    """S: replica slots a rank."""

    dispatcher: Literal["alltoall"] = "alltoall"
    """How tokens travel."""

    cluster: str = "auto"
    """Rates that planners price with: a name in toml_configs/clusters or a .toml file.
    "auto": cpu_local on CPU, h800_4x8 on CUDA."""

    ranks_per_node: int | None = None
    """Ranks of one NVLink domain. Default: the ranks that torchrun starts on a machine. A smaller
    value emulates several domains on one machine."""

    router_skew: float | None = None
    """Synthetic routing for performance runs: standard deviation of a fixed expert bias (the sign
    does not matter; the paper writes it negative). Default: the model's own (natural) routing."""

    expert_dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Compute dtype of the experts; replicas travel in it."""


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
