"""Unit costs against the figures that the paper and the design give; a plan priced by hand."""

import re

import pytest
import torch

from topoep_titan.cluster import ModelDims, load_cluster, modelled_time
from topoep_titan.cluster.cost_model import unit_costs
from topoep_titan.cluster.topology import CLUSTER_FOLDER
from topoep_titan.errors import InputError

QWEN3 = ModelDims(hidden=2048, moe_intermediate=768)


def test_unit_costs_of_qwen3_on_h800():
    costs = unit_costs(load_cluster("h800_4x8"), QWEN3)
    assert costs.assignment == 70_779  # 3 * 6*2048*768 / 400e12 s, in ps
    assert (costs.token_far, costs.token_near) == (163_840, 40_960)
    assert (costs.copy_far, costs.copy_near) == (188_743_680, 47_185_920)


def test_figure_3_bytes():
    """64 MiB of token traffic against 18 + 9 MiB of parameters and gradients (paper, Figure 3)."""
    n, mib = 4096, 2**20
    assert 4 * n * QWEN3.token_bytes == 64 * mib  # dispatch and combine, forward and backward
    assert QWEN3.expert_bytes == 9 * mib
    assert 2 * QWEN3.expert_bytes + QWEN3.expert_bytes == 27 * mib  # two pulls, one gradient


def test_a_plan_priced_by_hand():
    cluster = load_cluster("h800_4x8").resized(4, ranks_per_node=2)
    costs = unit_costs(cluster, QWEN3)
    # Expert x on rank x; expert 0 replicated on rank 1 (near) and rank 2 (far); S = 1.
    expert_G = torch.tensor([0, -1, 1, 0, 2, 0, 3, -1])
    assignments_RG = torch.zeros(4, 8, dtype=torch.int32)
    assignments_RG[0, 0] = 10  # stays
    assignments_RG[1, 0] = 4  # near, into rank 0
    assignments_RG[3, 0] = 7  # far, into rank 0
    assignments_RG[3, 5] = 5  # near, into rank 2
    time = modelled_time(
        expert_G, assignments_RG, main_E=torch.arange(4), cluster=cluster, dims=QWEN3
    )
    assert time.compute == 21 * costs.assignment
    assert time.token == 7 * costs.token_far + 5 * costs.token_near
    assert time.replica == costs.copy_far + costs.copy_near  # both leave rank 0
    assert time.plan == 30_000_000
    assert time.total == sum((time.compute, time.token, time.replica, time.plan))
    paper = modelled_time(
        expert_G, assignments_RG, main_E=torch.arange(4), cluster=cluster, dims=QWEN3,
        objective="paper",
    )  # fmt: skip
    assert paper.token == 7 * costs.token_far + 9 * costs.token_near


def test_bad_clusters(tmp_path):
    with pytest.raises(InputError, match="h800_4x8"):
        load_cluster("no_such_cluster")
    with pytest.raises(InputError, match="12 ranks do not fill nodes of 8"):
        load_cluster("h800_4x8").resized(12)
    broken = tmp_path / "broken.toml"
    broken.write_text('name = "x"\nnodes = 1\n')
    with pytest.raises(InputError, match="missing bw_far"):
        load_cluster(broken)
    text = (CLUSTER_FOLDER / "h800_4x8.toml").read_text()
    for rate in ("1e-300", "inf", "nan", "-1.0"):
        broken.write_text(re.sub(r"bw_far = \S+", f"bw_far = {rate}", text))
        with pytest.raises(InputError, match=r"bw_far is .*; give a rate per second from 1e\+06"):
            load_cluster(broken)
    broken.write_bytes(b"name = '\xff'")
    with pytest.raises(InputError, match=r"broken\.toml"):
        load_cluster(broken)
