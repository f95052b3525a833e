"""Microbatches x planner x cluster -> what the planner achieves and how long a step takes.

Two names run no planner: ``none`` leaves every assignment on its main instance and uses our
backend (rows deduplicated, two chunks); ``megatron`` is the paper's baseline, no balancing on a
plain all-to-all in one chunk.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor

from topoep_titan.cluster import Cluster
from topoep_titan.errors import InputError
from topoep_titan.planning import PLANNERS
from topoep_titan.planning.plan import Plan, contiguous_mains, unbalanced_plan
from topoep_titan.planning.quality import PlanQuality, plan_quality
from topoep_titan.simulator.calibration import Backends
from topoep_titan.simulator.layer import Backend, LayerCosts, layer_costs
from topoep_titan.simulator.models import Model
from topoep_titan.simulator.step import Step, simulate_step
from topoep_titan.simulator.traces import Microbatch

UNPLANNED = ("megatron", "none")
STALE = "eplb-stale"  # EPLB as deployed: placed for the previous microbatch's load
CONTESTANTS = ("megatron", *PLANNERS, STALE)


@dataclass(frozen=True)
class Replay:
    """Means over layers and microbatches; ``step`` and ``tokens_per_second`` of a mean step."""

    planner: str
    quality: list[PlanQuality]  # of each planned layer, in order
    layers: list[list[LayerCosts]]  # of each microbatch
    steps: list[Step]
    tokens_per_second: float  # over all ranks
    simulated_us: dict[str, float]  # of a step: moe, dense, bubble, total

    def mean(self, name: str) -> float:
        """Of a field of PlanQuality."""
        return fmean(getattr(quality, name) for quality in self.quality)

    @property
    def modelled_us(self) -> dict[str, float]:
        """The closed form of a mean layer."""
        terms = [quality.modelled.as_us() for quality in self.quality]
        return {key: fmean(term[key] for term in terms) for key in terms[0]}


def replay(
    microbatches: Iterable[Microbatch],
    *,
    planner: str,
    model: Model,
    cluster: Cluster,
    backends: Backends,
    replica_slots: int,
    main_E: Tensor | None = None,
    accumulated: int = 1,
    rest: float = 0.0,
    overlap: bool = True,
    exact_rows: bool = False,
    history: Microbatch | None = None,
) -> Replay:
    """Simulate one step for each microbatch, as if a step held ``accumulated`` like it.

    ``exact_rows`` counts the deduplicated rows from the ids instead of expecting them (slow, needed
    where experts are coupled). ``rest``: seconds of a step outside layers and FLOPs. ``history`` is
    the microbatch before the first. Raises InputError for an unknown planner.
    """
    backend = backend_of(planner, backends)
    quality, layers, steps, tokens = [], [], [], 0
    previous = None if history is None else history.load_LRE
    ranks = cluster.ranks
    planned = planner not in UNPLANNED
    for microbatch in microbatches:
        costs = []
        for index, load_RE in enumerate(microbatch.load_LRE):
            mains = contiguous_mains(*load_RE.shape) if main_E is None else main_E
            stale_RE = None if previous is None else previous[index]
            plan = plan_layer(load_RE, planner, mains, cluster, model, replica_slots, stale_RE)
            group = {"main_E": mains, "cluster": cluster}
            costs.append(
                layer_costs(
                    plan,
                    **group,
                    dims=model.dims,
                    backend=backend,
                    tokens=microbatch.tokens,
                    planned=planned,
                    ids_RTK=microbatch.ids_LRTK[index] if exact_rows else None,
                )
            )
            quality.append(plan_quality(plan, **group, model_dims=model.dims))
        previous = microbatch.load_LRE
        layers.append(costs)
        tokens += microbatch.tokens
        step = simulate_step(
            costs, model=model, cluster=cluster, backend=backend, tokens=microbatch.tokens,
            microbatches=accumulated, rest=rest, overlap=overlap,
        )  # fmt: skip
        steps.append(step)
    if not steps:
        raise InputError("no microbatch to replay; give at least one")
    seconds = sum(step.total for step in steps)
    # A pipeline's stages share one stream of tokens: each stage has `ranks` ranks of its own.
    return Replay(
        planner=planner,
        quality=quality,
        layers=layers,
        steps=steps,
        tokens_per_second=tokens * ranks * accumulated / seconds,
        simulated_us={
            name: 1e6 * fmean(getattr(step, name) for step in steps)
            for name in ("moe", "dense", "bubble", "total")
        },
    )


def plan_layer(
    load_RE: Tensor,
    planner: str,
    main_E: Tensor,
    cluster: Cluster,
    model: Model,
    replica_slots: int,
    stale_RE: Tensor | None = None,
) -> Plan:
    """``eplb-stale`` places for ``stale_RE``, and does nothing before it has seen a load."""
    if planner in UNPLANNED or (planner == STALE and stale_RE is None):
        return unbalanced_plan(load_RE, main_E, replica_slots)
    given = {"main_E": main_E, "cluster": cluster, "model_dims": model.dims}
    if planner == STALE:
        return PLANNERS["eplb"](load_RE, **given, replica_slots=replica_slots, estimate_RE=stale_RE)
    return PLANNERS[planner](load_RE, **given, replica_slots=replica_slots)


def backend_of(planner: str, backends: Backends) -> Backend:
    check_contestants([planner])
    return backends.plain if planner == "megatron" else backends.chunked


def check_contestants(names: Sequence[str]) -> tuple[str, ...]:
    """The names. Raises InputError for an unknown one."""
    for name in names:
        if name not in CONTESTANTS:
            raise InputError(f"unknown planner {name!r}; choose one of: {', '.join(CONTESTANTS)}")
    return tuple(names)
