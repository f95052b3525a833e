"""Renaming the ranks of a new placement, and the modelled times of keeping and of moving."""

from itertools import permutations, product

import pytest
import torch

from topoep_titan.cluster import ModelDims, load_cluster
from topoep_titan.placement.refresh import layer_seconds, move_seconds, relabelled


def test_relabelling_by_hand():
    """Two nodes of two ranks, three experts a rank; experts 2 and 3 changed places."""
    old_E = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3])
    new_E = torch.tensor([3, 3, 2, 3, 2, 2, 0, 0, 0, 1, 1, 1])  # under other names
    assert relabelled(new_E, old_E, 4, 2).tolist() == [0, 0, 1, 0, 1, 1, 2, 2, 2, 3, 3, 3]


def test_relabelling_is_the_least_movement_that_keeps_nodes_whole():
    """Against every renaming of two nodes of three ranks."""
    generator = torch.Generator().manual_seed(0)
    old_E, new_E = (torch.randperm(24, generator=generator) % 6 for _ in range(2))
    names = (
        torch.tensor([*a, *b])
        for first, second in ((0, 3), (3, 0))
        for a, b in product(
            *(permutations(range(start, start + 3)) for start in (first, second))
        )
    )  # fmt: skip
    least = min(int((name_R[new_E] != old_E).sum()) for name_R in names)
    named_E = relabelled(new_E, old_E, 6, 3)
    assert int((named_E != old_E).sum()) == least
    assert len({(int(a), int(b)) for a, b in zip(new_E, named_E)}) == 6  # one name a rank


def test_modelled_times_by_hand():
    """Two nodes of one rank. 10 of 20 tokens on each rank visit both, the others rank 0 alone."""
    cluster = load_cluster("h800_4x8").resized(2, 1)
    dims = ModelDims(2, 5)
    ids_TK = torch.tensor([[0, 1]] * 10 + [[0, 2]] * 10)
    main_E = torch.tensor([0, 1, 0, 1])
    compute = 3 * 6 * 2 * 5 / cluster.flops * 60  # assignments of rank 0, of 40 tokens
    rows = 40 / 2  # all visit rank 0, half of them from the other node
    seconds = layer_seconds(
        ids_TK, main_E, cluster=cluster, model_dims=dims, dispatcher="dedup-node", tokens=40,
        levelled=False,
    )  # fmt: skip
    assert seconds == pytest.approx(compute + 2 * 4 * rows / cluster.bw_far)
    levelled = layer_seconds(  # 80 assignments, 40 on each rank
        ids_TK, main_E, cluster=cluster, model_dims=dims, dispatcher="dedup-node", tokens=40,
        levelled=True,
    )  # fmt: skip
    assert levelled == pytest.approx(compute * 40 / 60 + 2 * 4 * rows / cluster.bw_far)
    moved_E = torch.tensor([1, 0, 0, 1])  # one expert arrives on each rank: 3 * 10 parameters
    cost = move_seconds(moved_E, main_E, cluster=cluster, model_dims=dims)
    assert cost == pytest.approx(30 * 12 / cluster.bw_far)
