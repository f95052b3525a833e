"""The closed-form time of one MoE layer and microbatch under a plan, in integer picoseconds.

    t_ffn   = 6*D*F / flops                               one assignment, forward
    compute = 3 * t_ffn * max_r L_r                       forward + backward
    token   = 2*S_tok * (max_port far / bw_far + max_port near / bw_near)
    replica = |W| * max_r (max(in_far, out_far) / bw_far + max(in_near, out_near) / bw_near)
    plan    = plan_us of the cluster when the plan holds a replica, else 0
    total   = compute + token + replica + plan

Half of the four token passes is exposed (paper, C4), hence 2*S_tok; backward pulls are hidden.
"Far" crosses nodes, "near" stays in the node but leaves the rank. A port is the larger of what one
rank sends and receives. Each unit cost is rounded once, so that totals are exact integers.

Letters: R ranks, E experts, G slots, L_r assignments executed on rank r, D width, F expert width.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from topoep_titan.cluster.topology import Cluster
from topoep_titan.errors import InputError

PICOSECONDS = 1e12
MOST_PICOSECONDS = 2**61  # 27 days: sums of two stay inside int64


@dataclass(frozen=True)
class ModelDims:
    """The two widths that the costs depend on (activations and parameters in bf16)."""

    hidden: int  # D
    moe_intermediate: int  # F

    @property
    def token_bytes(self) -> int:
        """S_tok = 2*D: one hidden vector."""
        return 2 * self.hidden

    @property
    def expert_bytes(self) -> int:
        """|W| = 6*D*F: gate, up and down projections of one expert."""
        return 6 * self.hidden * self.moe_intermediate


@dataclass(frozen=True)
class UnitCosts:
    """Integer picoseconds."""

    assignment: int  # three passes of one assignment through its expert
    token_far: int  # one assignment on the busiest far port
    token_near: int
    copy_far: int  # one expert copy on the busiest far port
    copy_near: int
    plan: int


@dataclass(frozen=True)
class LayerTime:
    """Integer picoseconds, by term."""

    compute: int
    token: int
    replica: int
    plan: int

    @property
    def total(self) -> int:
        return self.compute + self.token + self.replica + self.plan

    def as_us(self) -> dict[str, float]:
        """The ``modelled_us`` object of every report: microseconds by term, and their total."""
        terms = {name: getattr(self, name) for name in ("compute", "token", "replica", "plan")}
        return {name: value / 1e6 for name, value in {**terms, "total": self.total}.items()}


def unit_costs(cluster: Cluster, dims: ModelDims) -> UnitCosts:
    flops = 6 * dims.hidden * dims.moe_intermediate
    return UnitCosts(
        assignment=round(3 * flops / cluster.flops * PICOSECONDS),
        token_far=round(2 * dims.token_bytes / cluster.bw_far * PICOSECONDS),
        token_near=round(2 * dims.token_bytes / cluster.bw_near * PICOSECONDS),
        copy_far=round(dims.expert_bytes / cluster.bw_far * PICOSECONDS),
        copy_near=round(dims.expert_bytes / cluster.bw_near * PICOSECONDS),
        plan=round(cluster.plan_us * 1e6),
    )


def check_prices(cluster: Cluster, dims: ModelDims, *, assignments: int, copies: int) -> None:
    """Raise InputError where the dearest plan of so many assignments and copies may leave int64.

    The planners add up prices of both ends of a token's way and a weighted compute term.
    """
    costs = unit_costs(cluster, dims)
    token = costs.assignment + 2 * (costs.token_far + costs.token_near) + 2 * dims.token_bytes
    copy = costs.copy_far + costs.copy_near + dims.expert_bytes
    dearest = max(token * (assignments + 100), copy * max(1, copies), costs.plan)
    if dearest > MOST_PICOSECONDS:
        raise InputError(
            f"{assignments} assignments of width {dims.hidden} x {dims.moe_intermediate} may take "
            f"{dearest / PICOSECONDS:.3g} s on cluster {cluster.name!r}; modelled times go up to "
            f"{MOST_PICOSECONDS / PICOSECONDS:.3g} s: raise its rates, or plan fewer assignments"
        )


def copies_between(expert_G: Tensor, main_E: Tensor, ranks: int) -> Tensor:
    """int64 (R, R): expert copies that rank i (main) sends to rank j (replica) in forward."""
    per_rank = expert_G.numel() // ranks
    slot_G = torch.arange(expert_G.numel())
    occupied = expert_G >= 0
    home = main_E.long()[expert_G[occupied].long()]
    host = slot_G[occupied] // per_rank
    copies = torch.zeros(ranks, ranks, dtype=torch.int64)
    copies.index_put_((home, host), torch.ones_like(host), accumulate=True)
    return copies.fill_diagonal_(0)  # a main instance is not a copy


def modelled_time(
    expert_G: Tensor,
    assignments_RG: Tensor,
    *,
    main_E: Tensor,
    cluster: Cluster,
    dims: ModelDims,
    objective: Literal["port", "paper"] = "port",
) -> LayerTime:
    """Price a plan on a cluster of R = ``assignments_RG.shape[0]`` ranks.

    ``objective="paper"`` is the paper's equation 8: token and replica terms are sums over all
    transfers, not maxima over ports.
    """
    ranks = assignments_RG.shape[0]
    cost = unit_costs(cluster, dims)
    sent = assignments_RG.long().view(ranks, ranks, -1).sum(2)  # (source, executing rank)
    copies = copies_between(expert_G, main_E, ranks)
    far, near = link_masks(ranks, cluster.ranks_per_node)
    if objective == "paper":
        token = cost.token_far * int((sent * far).sum()) + cost.token_near * int(
            (sent * near).sum()
        )
        replica = cost.copy_far * int((copies * far).sum()) + cost.copy_near * int(
            (copies * near).sum()
        )
        busiest = int(sent.sum(0).max())
        plan = cost.plan if int(copies.sum()) else 0
        return LayerTime(cost.assignment * busiest, token, replica, plan)
    return port_time(sent.sum(0), sent * far, sent * near, copies, cluster, cost)


def link_masks(ranks: int, ranks_per_node: int) -> tuple[Tensor, Tensor]:
    """bool (R, R) twice: pairs of ranks on different nodes, and pairs within one node."""
    node = torch.arange(ranks) // ranks_per_node
    far = node[:, None] != node[None, :]
    return far, ~far & ~torch.eye(ranks, dtype=torch.bool)


def port_time(
    load_R: Tensor,
    far_RR: Tensor,
    near_RR: Tensor,
    copies_RR: Tensor,
    cluster: Cluster,
    cost: UnitCosts,
) -> LayerTime:
    """Price loads, and what each rank sends to each over the two link classes, by busiest ports.

    ``far_RR`` and ``near_RR``: assignments, or rows where a dispatcher deduplicates them.
    """
    far, near = link_masks(len(load_R), cluster.ranks_per_node)
    return LayerTime(
        compute=cost.assignment * int(load_R.max()),
        token=cost.token_far * int(_ports(far_RR).max())
        + cost.token_near * int(_ports(near_RR).max()),
        replica=int(
            (
                cost.copy_far * _ports(copies_RR * far) + cost.copy_near * _ports(copies_RR * near)
            ).max()
        ),
        plan=cost.plan if int(copies_RR.sum()) else 0,
    )


def _ports(traffic_RR: Tensor) -> Tensor:
    """(R,): the larger of what each rank receives and sends."""
    return torch.maximum(traffic_RR.sum(0), traffic_RR.sum(1))
