"""When a new placement is worth its move, and how to name its ranks so that few experts move.

Letters: T tokens, K top-k, E experts, R ranks, M nodes, g ranks a node, D width, F expert width.
"""

from typing import Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from topoep_titan.cluster import Cluster, ModelDims
from topoep_titan.placement.quality import visited

# A parameter and its two Adam moments, 4 bytes each; an expert has 3*D*F parameters.
STATE_BYTES = 3 * 4


def relabelled(new_E: Tensor, old_E: Tensor, ranks: int, ranks_per_node: int) -> Tensor:
    """int64 (E,): ``new_E`` with its nodes, and the ranks of each, renamed to match ``old_E`` best.

    The number of experts that change rank is the least that renaming can reach (Hungarian method
    on shared experts, within each pair of nodes and then over the nodes).
    """
    nodes = ranks // ranks_per_node
    shared = torch.zeros(ranks, ranks, dtype=torch.int64)
    shared.index_put_((new_E, old_E), torch.ones_like(new_E), accumulate=True)
    blocks = shared.view(nodes, ranks_per_node, nodes, ranks_per_node).transpose(1, 2)
    pairs = [[linear_sum_assignment(-block.numpy()) for block in row] for row in blocks]
    kept = [
        [int(block[rows, columns].sum()) for block, (rows, columns) in zip(row, matched)]
        for row, matched in zip(blocks, pairs)
    ]
    name_R = torch.empty(ranks, dtype=torch.int64)
    for node, old_node in zip(*linear_sum_assignment(-torch.tensor(kept).numpy())):
        rows, columns = (torch.from_numpy(index) for index in pairs[node][old_node])
        name_R[rows + node * ranks_per_node] = columns + old_node * ranks_per_node
    return name_R[new_E]


def layer_seconds(
    ids_TK: Tensor,
    main_E: Tensor,
    *,
    cluster: Cluster,
    model_dims: ModelDims,
    dispatcher: Literal["dedup", "dedup-node"],
    tokens: int,
    levelled: bool,
) -> float:
    """Modelled seconds of one layer and microbatch of ``tokens`` in all, judged on a sample.

    ``levelled``: a planner spreads load over replicas, so every rank computes the mean load; what
    the copies cost is left out.

    The compute and token terms of the cost model, in rows: tokens come evenly from all ranks, and
    the busiest rank (or node, whose relays share its rows) sets the pace.
    """
    ranks, per_node, nodes = cluster.ranks, cluster.ranks_per_node, cluster.nodes
    scale = tokens / len(ids_TK)
    rank_TK = main_E.long()[ids_TK.long()]
    load_R = torch.bincount(rank_TK.flatten(), minlength=ranks).double() * scale
    load = float(load_R.mean() if levelled else load_R.max())
    arriving = float(visited(rank_TK, ranks).sum(0).max()) * scale
    if dispatcher == "dedup-node":
        at_node = float(visited(rank_TK // per_node, nodes).sum(0).max()) * scale
        far = at_node * (nodes - 1) / nodes / per_node
        near = arriving * (per_node - 1) / per_node
    else:
        far, near = arriving * (nodes - 1) / nodes, arriving * (per_node - 1) / ranks
    compute = 3 * 6 * model_dims.hidden * model_dims.moe_intermediate / cluster.flops * load
    return compute + 2 * model_dims.token_bytes * (far / cluster.bw_far + near / cluster.bw_near)


def move_seconds(new_E: Tensor, old_E: Tensor, *, cluster: Cluster, model_dims: ModelDims) -> float:
    """Of one layer: the busiest rank's arriving experts with their optimizer state."""
    arriving = new_E[new_E != old_E]
    most = int(torch.bincount(arriving, minlength=cluster.ranks).max())
    parameters = 3 * model_dims.hidden * model_dims.moe_intermediate
    slowest = cluster.bw_far if cluster.nodes > 1 else cluster.bw_near
    return most * parameters * STATE_BYTES / slowest


def position_of(main_E: Tensor) -> Tensor:
    """int64 (E,): row of each expert in the experts' parameters, ascending ids within a rank."""
    position_E = torch.empty_like(main_E)
    position_E[torch.argsort(main_E, stable=True)] = torch.arange(main_E.numel())
    return position_E
