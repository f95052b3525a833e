"""What a placement is worth on routed tokens: rows per token, node rows, locality, load.

Letters: T tokens, K top-k, E experts, R ranks, M nodes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from topoep_titan.errors import InputError
from topoep_titan.placement.sets import check_ids


@dataclass(frozen=True)
class PlacementQuality:
    """Means over tokens; *remote* and *far* leave out a token's own rank and own node."""

    rows: float  # distinct ranks: what a deduplicating dispatcher delivers
    rows_removed: float  # 1 - rows / K: share of one-row-per-assignment that it spares
    remote_rows: float  # distinct ranks other than the token's own
    nodes: float  # distinct nodes
    far_rows: float  # distinct nodes other than the token's own: rows that cross nodes
    locality: float  # share of assignments whose expert is on the token's rank
    load_max_over_mean: float  # assignments of the busiest rank over the mean
    rows_max_over_mean: float  # the same for received rows


def placement_quality(
    ids_TK: Tensor,
    main_E: Tensor,
    *,
    ranks: int,
    ranks_per_node: int,
    source_T: Tensor | None = None,
) -> PlacementQuality:
    """``source_T``: rank of each token; by default the tokens are dealt out in order, in R runs.

    Raises InputError when ids, placement and ranks do not fit together.
    """
    experts = main_E.numel()
    check_ids(ids_TK, experts)
    if ranks < 1 or ranks_per_node < 1 or ranks % ranks_per_node:
        raise InputError(f"{ranks} ranks do not fill nodes of {ranks_per_node}")
    if main_E.ndim != 1 or int(main_E.min()) < 0 or int(main_E.max()) >= ranks:
        raise InputError(
            f"the placement must name a rank from 0 to {ranks - 1} for each expert, got shape "
            f"{tuple(main_E.shape)}, ranks {int(main_E.min())} to {int(main_E.max())}"
        )
    tokens, top_k = ids_TK.shape
    if source_T is None:
        source_T = torch.arange(tokens) * ranks // tokens
    rank_TK = main_E.long()[ids_TK.long()]
    hit_TR = visited(rank_TK, ranks)
    hit_TM = visited(rank_TK // ranks_per_node, ranks // ranks_per_node)
    own_T = hit_TR.gather(1, source_T[:, None])
    own_node_T = hit_TM.gather(1, source_T[:, None] // ranks_per_node)
    load_R = torch.bincount(rank_TK.flatten(), minlength=ranks).double()
    rows_R = hit_TR.sum(0).double()
    rows, nodes = (float(hit.sum()) / tokens for hit in (hit_TR, hit_TM))
    return PlacementQuality(
        rows=rows,
        rows_removed=1 - rows / top_k,
        remote_rows=rows - float(own_T.sum()) / tokens,
        nodes=nodes,
        far_rows=nodes - float(own_node_T.sum()) / tokens,
        locality=float((rank_TK == source_T[:, None]).double().mean()),
        load_max_over_mean=float(load_R.max() / load_R.mean()),
        rows_max_over_mean=float(rows_R.max() / rows_R.mean()),
    )


def visited(group_TK: Tensor, groups: int) -> Tensor:
    """bool (T, groups): whether a token has an expert there."""
    hit = torch.zeros(len(group_TK), groups, dtype=torch.bool)
    return hit.scatter_(1, group_TK, torch.ones((), dtype=torch.bool).expand_as(group_TK))
