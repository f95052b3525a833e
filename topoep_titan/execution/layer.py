"""One MoE layer's routed experts under a plan, from counts to combined outputs.

Letters: R ranks, E experts, e = E/R mains a rank, S replica slots a rank, T tokens, K top-k,
D width, F expert width. Order: gather counts, plan, pull replicas, dispatch, experts, combine.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from topoep_titan.execution.exchange import combine, dispatch, plan_route
from topoep_titan.execution.experts import expert_ffn
from topoep_titan.execution.replicas import plan_copies, pull_replicas
from topoep_titan.execution.transport import Transport
from topoep_titan.planning.plan import Plan


@dataclass(frozen=True)
class LayerRecord:
    """What one call planned, for metrics."""

    load_RE: Tensor
    plan: Plan
    plan_seconds: float


def run_layer(
    x_TD: Tensor,
    scores_TK: Tensor,
    ids_TK: Tensor,
    counts_E: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    *,
    planner: Callable[[Tensor], Plan],
    main_E: Tensor,
    replica_slots: int,
    transport: Transport,
    compute_dtype: torch.dtype,
) -> tuple[Tensor, LayerRecord]:
    """Route, execute and combine this rank's tokens; collective over the transport's ranks.

    ``counts_E``: this rank's assignments per expert. ``weights``: w1 (e, F, D), w2 (e, D, F) and
    w3 (e, F, D) of this rank's mains in ascending logical id. ``planner`` maps ``load_RE`` on the
    CPU to a Plan and must be deterministic: every rank derives its own.
    Returns (T, D) in the dtype of ``x_TD``, differentiable in x, scores and weights.
    """
    load_RE = transport.gather_counts(counts_E)
    started = time.perf_counter()
    plan = planner(load_RE.cpu())
    plan_seconds = time.perf_counter() - started

    mains = tuple(weight.to(compute_dtype) for weight in weights)
    copies = plan_copies(plan, main_E, transport.ranks, transport.rank)
    on_device = Plan(plan.expert_G.to(x_TD.device), plan.assignments_RG.to(x_TD.device))
    route = plan_route(on_device, ids_TK, transport)
    rows_MD = dispatch(x_TD.to(compute_dtype), route, ids_TK.shape[1], transport)

    num_mains = weights[0].shape[0]
    main_rows = sum(route.rows_P[:num_mains])
    y_MD = expert_ffn(rows_MD[:main_rows], route.rows_P[:num_mains], *mains)
    if copies is not None:
        replicas = pull_replicas(mains, copies, replica_slots, transport)
        y_replicas = expert_ffn(rows_MD[main_rows:], route.rows_P[num_mains:], *replicas)
        y_MD = torch.cat([y_MD, y_replicas])
    out_TD = combine(y_MD, scores_TK, route, transport).to(x_TD.dtype)
    return out_TD, LayerRecord(load_RE, plan, plan_seconds)
