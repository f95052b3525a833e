"""Counting only the sources that differ gives what counting every source gives."""

import torch

from recipes import coupling_scale
from topoep_titan.cluster import load_cluster
from topoep_titan.planning.plan import unbalanced_plan
from topoep_titan.planning.workloads import load_of, skew
from topoep_titan.simulator.calibration import backends
from topoep_titan.simulator.layer import layer_costs


def test_repeated_sources_are_counted_once():
    experts, ranks, tokens = 32, 8, 64
    cluster = load_cluster("h800_4x8").resized(ranks, 4)
    ids_RTK = skew(experts, 4, coupling_scale.DRAWN, tokens, router_skew=-1.0, seed=0)
    main_E = torch.randperm(experts, generator=torch.Generator().manual_seed(0)) % ranks
    every_RTK = ids_RTK.repeat(ranks // coupling_scale.DRAWN, 1, 1)
    costs = layer_costs(
        unbalanced_plan(load_of(every_RTK, experts), main_E, 0), main_E=main_E, cluster=cluster,
        dims=coupling_scale.DIMS, backend=backends().chunked, tokens=tokens, planned=False,
        ids_RTK=every_RTK,
    )  # fmt: skip
    found = coupling_scale.layer(ids_RTK, main_E, cluster, experts)
    assert found["token"] == 1e3 * float(costs.token_R.max())
    assert found["expert"] == 1e3 * float(costs.expert_R.max())
    # By hand: rows are distinct (rank, node) of a token; of its nodes, the source's own is not far.
    rank_RTK = main_E[every_RTK.long()]
    away = [
        len(set((token // 4).tolist()) - {source // 4})
        for source, tokens_TK in enumerate(rank_RTK)
        for token in tokens_TK
    ]
    assert found["far"] * coupling_scale.TOKENS * ranks == sum(away)
