"""FasterMoE's dynamic shadowing: copy the hottest experts to every rank, so their tokens stay.

Source: FasterMoE (PPoPP 2022) and the policy of the FastMoE release, the paper's baseline [10] of
section 6.1. With k shadows the release predicts, for the busiest expert that is not shadowed,

    time(k) = 3*t_ffn*B_k + 4*S_tok*B_k/bw + k * 2*|W|/bw

and shadows one more while this falls strictly. B_k is the (k+1)-th largest total of an expert over
all sources (the release sums over experts instead, which is the same for every source and shadows
nothing). Adaptations: this project's expert and bf16 in the unit costs; ``bw`` is the slowest link
of the group, as the model knows one; shadows stop where a rank has no slot left. Where several
experts are about equally hot the first shadow lowers no B, and the policy does nothing.
"""

from torch import Tensor

from topoep_titan.cluster import Cluster, ModelDims
from topoep_titan.cluster.cost_model import unit_costs
from topoep_titan.planning.plan import Plan
from topoep_titan.planning.quotas import mains_by_rank, nearest_first, plan_from_quotas


def fastermoe(
    load_RE: Tensor,
    *,
    main_E: Tensor,
    cluster: Cluster,
    model_dims: ModelDims,
    replica_slots: int,
) -> Plan:
    """Shadow whole experts on all ranks as long as the predicted time falls and slots last."""
    ranks, experts = load_RE.shape
    slots_per_rank = experts // ranks + replica_slots
    total = load_RE.sum(0).tolist()
    hosted = mains_by_rank(main_E, ranks)
    main = main_E.tolist()
    cost = unit_costs(cluster, model_dims)
    token, copy = cost.token_near, cost.copy_near
    if cluster.nodes > 1:
        token, copy = cost.token_far, cost.copy_far
    by_load = sorted(range(experts), key=lambda x: (-total[x], x))
    # Cost units hold two token passes and one transfer of |W|; the formula has four and two.
    time = [(cost.assignment + 2 * token) * total[x] + 2 * k * copy for k, x in enumerate(by_load)]
    time.append(2 * experts * copy)  # nothing left outside the shadows
    shadowed = {}
    for k, x in enumerate(by_load):
        others = [rank for rank in range(ranks) if rank != main[x]]
        if time[k + 1] >= time[k] or any(len(hosted[r]) == slots_per_rank for r in others):
            break
        for rank in others:
            hosted[rank].append(x)
        shadowed[x] = dict(enumerate(load_RE[:, x].tolist()))
    split = nearest_first(cluster.ranks_per_node)  # every source is an instance: all stays
    return plan_from_quotas(load_RE, hosted, slots_per_rank, shadowed, split)
