"""One MoE layer under a plan -> its costs on every rank, and its tasks in forward and backward.

The schedule is the paper's (section 3.3, Figures 7 and 8): one compute and one communication
stream, tokens in two chunks. In forward the replicas' parameters and chunk 1 arrive before its
experts run; chunk 2 arrives and chunk 1 returns meanwhile. In backward the parameters are pulled
again, each chunk computes input gradients before weight gradients, and replica gradients leave
last, under the attention's backward.

A ``Backend`` says how tokens travel and how far the machine falls short of the cluster file's
rates. All factors 1 and overheads 0: the assumptions of the closed form.

Letters: R ranks, T tokens of a rank and microbatch.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from topoep_titan.cluster import Cluster, ModelDims
from topoep_titan.planning.plan import Plan
from topoep_titan.simulator.timeline import Task
from topoep_titan.simulator.traffic import Ports, copy_ports, token_ports

BACKWARD_PASSES = 2  # of the experts: input gradients, then weight gradients


@dataclass(frozen=True)
class Backend:
    """How a plan is carried out. Scales multiply a time, overheads are added to each operation."""

    name: str
    dispatcher: str
    chunks: int
    compute_scale: float = 1.0
    half_width: float = 0.0  # expert width F at which the experts reach half of their rate
    compute_backward: float = 1.0  # of a backward pass over a forward pass of equal FLOPs
    near_scale: float = 1.0
    token_backward: float = 1.0
    excess: float = 1.0  # share of a busy port's excess over the mean port that is felt
    token_op_us: float = 0.0  # of one dispatch or combine of a chunk
    copy_scale: float = 1.0
    copy_op_us: float = 0.0  # of one pull or push
    plan_us: float | None = None  # None: the cluster's


@dataclass(frozen=True)
class LayerCosts:
    """Seconds of rank r if nothing overlaps: one pass over all its assignments or rows."""

    expert_R: np.ndarray  # forward
    token_R: np.ndarray  # one dispatch or one combine, forward
    copy_R: np.ndarray  # one pull or push; 0 where the plan holds no replica
    plan: float
    gather: float  # all ranks learn the load


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one layer and direction, each on its slowest rank, as the paper's Figure 15."""

    expert: float
    token: float  # dispatch and combine
    replica: float  # pull


def layer_costs(
    plan: Plan,
    *,
    main_E: Tensor,
    cluster: Cluster,
    dims: ModelDims,
    backend: Backend,
    tokens: int,
    planned: bool,
    ids_RTK: Tensor | None = None,
) -> LayerCosts:
    """``planned``: whether a planner ran, which costs its time whatever it returned."""
    ranks, slots = plan.assignments_RG.shape
    executed_R = plan.assignments_RG.sum(0).view(ranks, -1).sum(1).numpy()
    flops = 6 * dims.hidden * dims.moe_intermediate
    narrow = 1 + backend.half_width / dims.moe_intermediate
    rows = token_ports(
        plan, ranks_per_node=cluster.ranks_per_node, tokens=tokens,
        dispatcher=backend.dispatcher, ids_RTK=ids_RTK,
    )  # fmt: skip
    copies = copy_ports(plan, main_E, ranks_per_node=cluster.ranks_per_node)
    plan_us = cluster.plan_us if backend.plan_us is None else backend.plan_us
    counts = ranks * (slots - plan.num_replicas) * 4  # bytes; an upper bound of R*E int32
    return LayerCosts(
        expert_R=executed_R * (flops / cluster.flops * backend.compute_scale * narrow),
        token_R=port_seconds(rows, dims.token_bytes, cluster, backend),
        copy_R=port_seconds(copies, dims.expert_bytes * backend.copy_scale, cluster, backend)
        + (backend.copy_op_us * 1e-6 if plan.num_replicas else 0.0),
        plan=plan_us * 1e-6 if planned else 0.0,
        gather=cluster.lat_far + counts / cluster.bw_far,
    )


def breakdown(costs: LayerCosts, backend: Backend) -> tuple[Breakdown, Breakdown]:
    """Forward and backward. They overlap in a step, so they do not add up to it."""
    expert, token = costs.expert_R.max(), 2 * backend.chunks * _chunk(costs, backend).max()
    backward = BACKWARD_PASSES * backend.compute_backward
    replica = float(costs.copy_R.max())
    return (
        Breakdown(float(expert), float(token), replica),
        Breakdown(float(expert * backward), float(token * backend.token_backward), replica),
    )


def forward_tasks(name: str, costs: LayerCosts, backend: Backend, after: str) -> list[Task]:
    """From the router's ids to the combined outputs; ``after`` is the task that routes."""
    everywhere = np.zeros_like(costs.expert_R)
    pass_R = _chunk(costs, backend)
    tasks = [
        Task(f"{name}.gather", "compute", everywhere + costs.gather, (after,), True),
        Task(f"{name}.plan", "compute", everywhere + costs.plan),
        Task(f"{name}.pull", "comm", costs.copy_R, (f"{name}.plan",), True),
    ]
    chunks = range(backend.chunks)
    tasks += [Task(f"{name}.dispatch{c}", "comm", pass_R, (f"{name}.plan",), True) for c in chunks]
    for c in chunks:
        ready = (f"{name}.pull", f"{name}.dispatch{c}")
        tasks.append(Task(f"{name}.expert{c}", "compute", costs.expert_R / backend.chunks, ready))
    for c in chunks:
        tasks.append(Task(f"{name}.combine{c}", "comm", pass_R, (f"{name}.expert{c}",), True))
    return tasks


def backward_tasks(name: str, costs: LayerCosts, backend: Backend, after: str) -> list[Task]:
    """From the gradient of the outputs to that of the inputs; ``after`` is what produces it."""
    pass_R = _chunk(costs, backend) * backend.token_backward
    one_R = costs.expert_R / backend.chunks * backend.compute_backward
    chunks = range(backend.chunks)
    tasks = [Task(f"{name}.repull", "comm", costs.copy_R, (), True)]
    tasks += [Task(f"{name}.dispatch{c}", "comm", pass_R, (after,), True) for c in chunks]
    for c in chunks:
        ready = (f"{name}.repull", f"{name}.dispatch{c}")
        tasks.append(Task(f"{name}.dgrad{c}", "compute", one_R, ready))
        tasks.append(Task(f"{name}.wgrad{c}", "compute", one_R))
    # One chunk is plain autograd: an expert's backward is one node, both gradients, then combine.
    done = "dgrad" if backend.chunks > 1 else "wgrad"
    for c in chunks:
        tasks.append(Task(f"{name}.combine{c}", "comm", pass_R, (f"{name}.{done}{c}",), True))
    tasks.append(Task(f"{name}.push", "comm", costs.copy_R, (f"{name}.wgrad{chunks[-1]}",), True))
    return tasks


def _chunk(costs: LayerCosts, backend: Backend) -> np.ndarray:
    """Seconds of one chunk's dispatch or combine in forward."""
    return costs.token_R / backend.chunks + backend.token_op_us * 1e-6


def port_seconds(ports: Ports, size: float, cluster: Cluster, backend: Backend) -> np.ndarray:
    """NIC and NVLink work at the same time; the later one ends the pass."""
    far_R = ports.far_R * (size / cluster.bw_far) + cluster.lat_far * (ports.far_R > 0)
    near_R = ports.near_R * (size * backend.near_scale / cluster.bw_near)
    busy_R = np.maximum(far_R, near_R + cluster.lat_near * (ports.near_R > 0))
    mean = busy_R.mean()
    return mean + backend.excess * (busy_R - mean)
