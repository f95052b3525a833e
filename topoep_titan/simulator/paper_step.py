"""The paper's training step: its testbed, its draws of skewed routing, and what fits neither.

Three things are put in: the constants of Figure 15, the imbalance without balancing (Figure 13b),
and Megatron-LM's throughput at router_skew -4 (Figure 13a). The rest of a step is prediction.
"""

from functools import cache
from pathlib import Path
from typing import Any

import tomli

from topoep_titan.cluster import Cluster, load_cluster
from topoep_titan.errors import InputError
from topoep_titan.planning.workloads import load_of, skew
from topoep_titan.simulator.calibration import backends
from topoep_titan.simulator.models import Model
from topoep_titan.simulator.replay import Replay, replay
from topoep_titan.simulator.traces import Microbatch, synthetic

PUBLISHED = Path(__file__).resolve().parents[2] / "recipes" / "published.toml"
CLUSTER, CALIBRATION = "h800_4x8", "figure_15"
TOKENS = 4096  # of a rank and microbatch
SLOTS = 2
DRAWS, CANDIDATES, ALIKE = 5, 60, 0.05


@cache
def published() -> dict[str, Any]:
    return tomli.loads(PUBLISHED.read_text())


def paper_models() -> tuple[str, ...]:
    return tuple(published()["figure_12"]["models"])


def paper_cluster(model: Model) -> Cluster:
    """The group of ``model`` on the paper's testbed."""
    return load_cluster(CLUSTER).resized(model.expert_parallel)


def matched_seeds(model: Model) -> list[int]:
    """The first five of sixty draws at router_skew -4 as uneven as the paper's, within 5 %.

    One draw of the experts' bias decides a run's imbalance (Qwen3, EP 32: 4.1 to 7.5 times the mean
    between the 10th and 90th percentile of draws), and the paper's draw is not published; its
    max/mean without balancing is (Figure 13b). One rank's tokens suffice to estimate it.
    """
    wanted = published()["figure_13"]["megatron_max_over_mean"][_index(model)]
    found = []
    for seed in range(CANDIDATES):
        ids = skew(model.experts, model.top_k, 1, TOKENS, router_skew=-4.0, seed=seed)
        load_R = load_of(ids, model.experts).view(model.expert_parallel, -1).sum(1).double()
        if abs(float(load_R.max() / load_R.mean()) / wanted - 1) < ALIKE:
            found.append(seed)
    return found[:DRAWS]


def skewed(model: Model, router_skew: float, seed: int) -> Microbatch:
    """All layers of a run have the same bias, and here the same tokens."""
    one = synthetic(
        "skew", layers=1, experts=model.experts, top_k=model.top_k, ranks=model.expert_parallel,
        tokens=TOKENS, seed=seed, router_skew=router_skew,
    )  # fmt: skip
    return Microbatch(one.ids_LRTK * model.moe_layers, one.load_LRE * model.moe_layers)


def simulated(
    model: Model,
    planner: str,
    drawn: list[Microbatch],
    *,
    overlap: bool = False,
    rest: float = 0.0,
    history: Microbatch | None = None,
    accumulated: int = 1,
    slots: int = SLOTS,
) -> Replay:
    """On the paper's testbed with Figure 15's constants, ``accumulated`` microbatches a step."""
    return replay(
        drawn, planner=planner, model=model, cluster=paper_cluster(model),
        backends=backends(CALIBRATION), replica_slots=slots, rest=rest, overlap=overlap,
        history=history, accumulated=accumulated,
    )  # fmt: skip


def unexplained(model: Model, drawn: list[Microbatch], accumulated: int = 1) -> float:
    """Seconds of the paper's step that neither its MoE layers nor FLOPs explain.

    What is left of Megatron-LM's published step at router_skew -4 (Figure 13a) after its simulated
    one on ``drawn``: the one end-to-end number that is put in, alike for every planner and skew.
    """
    speed = published()["figure_13"]["megatron_throughput"][_index(model)] * 1e3
    step = accumulated * model.expert_parallel * TOKENS / speed
    run = simulated(model, "megatron", drawn, accumulated=accumulated)
    return step - run.simulated_us["total"] / 1e6


def _index(model: Model) -> int:
    """Of the lists of ``published.toml``. Raises InputError for a model that the paper lacks."""
    if model.name not in paper_models():
        raise InputError(
            f"the paper published no step of {model.name}; choose one of: "
            f"{', '.join(paper_models())}"
        )
    return paper_models().index(model.name)
