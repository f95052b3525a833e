"""A replay -> the RunResult that a report lays over others of its kind."""

from statistics import fmean
from typing import Any

from topoep_titan.planning.quality import PlanQuality
from topoep_titan.results import RunResult, provenance
from topoep_titan.simulator.replay import Replay

# What a layer and a step share; a replay measures no planning time, so a layer's is None.
MEANS = ("max_over_mean_before", "max_over_mean", "inter_node_fraction", "replica_served_fraction")


def run_result(
    replayed: Replay,
    *,
    model: str,
    dispatcher: str,
    routing: str,
    ranks: int,
    tokens: list[int],
    config: dict[str, Any],
) -> RunResult:
    """One step for each microbatch; ``tokens`` of its step over all ranks. There is no loss."""
    layers = len(replayed.quality) // len(replayed.steps)
    steps = []
    for index, (step, count) in enumerate(zip(replayed.steps, tokens)):
        planned = replayed.quality[index * layers : (index + 1) * layers]
        steps.append(
            {
                "step": index + 1,
                "loss": None,
                "loss_hex": None,
                "seconds": step.total,
                "tokens_per_second": count / step.total,
                **{name: fmean(getattr(quality, name) for quality in planned) for name in MEANS},
                "layers": [_layer(quality) for quality in planned],
            }
        )
    return RunResult(
        kind="simulated", recipe=model, planner=replayed.planner, dispatcher=dispatcher,
        routing=routing, ranks=ranks, steps=steps, name=replayed.planner,
        modelled_us=replayed.modelled_us, config=config, **provenance(),
    )  # fmt: skip


def _layer(quality: PlanQuality) -> dict[str, Any]:
    return {
        **{name: getattr(quality, name) for name in MEANS},
        "num_replicas": quality.num_replicas,
        "plan_us": None,
    }
