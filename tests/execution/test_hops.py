"""Rows that travel: taken and summed by hand, and counted exactly as plan and routing imply."""

import pytest
import torch

from tests.execution.layer_cases import (
    TOKENS,
    D,
    E,
    F,
    K,
    S,
    on_virtual_ranks,
    problem,
    run_share,
    shuffled_mains,
)
from topoep_titan.cluster import load_cluster
from topoep_titan.cluster.row_model import row_traffic
from topoep_titan.execution.hops import Take
from topoep_titan.planning.plan import cut_assignments

R, PER_NODE = 4, 2
FP32 = 4  # bytes
FLOAT = torch.float32


def test_take_and_its_transpose_by_hand():
    take = Take(torch.tensor([2, 0, 2, 3]), size=5)
    source = torch.arange(5.0).unsqueeze(1)
    assert take.rows(source).flatten().tolist() == [2, 0, 2, 3]
    rows = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    assert take.sums(rows).flatten().tolist() == [2, 0, 1 + 4, 8, 0]
    nothing = Take(torch.empty(0, dtype=torch.int64), size=0)
    assert nothing.sums(torch.empty(0, 3)).shape == (0, 3)


def test_sums_of_bfloat16_round_once():
    """256 + 1 is 256 in bfloat16, so a sum that rounds at each step would stay there."""
    rows = torch.tensor([[256.0], *[[1.0]] * 8]).bfloat16()
    assert Take(torch.zeros(9, dtype=torch.int64), size=1).sums(rows).item() == 264


@pytest.fixture(scope="module")
def routed():
    """(slot, rank) of every assignment under the plan "full slots", by source rank."""
    ids_TK, *_ = problem("hot", R, torch.float32)
    ids = ids_TK.split(TOKENS[:R])
    record = on_virtual_ranks(R, PER_NODE, run_share, "alltoall", 1, "full slots", "hot", FLOAT)[0][
        2
    ]
    return record.plan, [cut_assignments(record.plan, ids[r], r) // (E // R + S) for r in range(R)]


def link(source: int, target: int) -> str:
    if source == target:
        return "own"
    return "near" if source // PER_NODE == target // PER_NODE else "far"


def rows_of(dispatcher: str, rank_TK_of: list[torch.Tensor]) -> dict[str, int]:
    """Token rows sent forward by all ranks, by link, from the definition of the dispatcher."""
    rows = dict.fromkeys(("own", "near", "far"), 0)
    for source, rank_TK in enumerate(rank_TK_of):
        for ranks in rank_TK.tolist():
            if dispatcher == "alltoall":
                for target in ranks:
                    rows[link(source, target)] += 1
            elif dispatcher == "dedup":
                for target in set(ranks):
                    rows[link(source, target)] += 1
            else:
                relays = {r // PER_NODE * PER_NODE + source % PER_NODE for r in ranks}
                for relay in relays:
                    rows[link(source, relay)] += 1
                for target in set(ranks):
                    relay = target // PER_NODE * PER_NODE + source % PER_NODE
                    rows[link(relay, target)] += 1
    return rows


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("dispatcher", ["alltoall", "dedup", "dedup-node"])
def test_traffic_is_what_plan_and_routing_imply(routed, dispatcher, chunks):
    plan, rank_TK_of = routed
    results = on_virtual_ranks(
        R, PER_NODE, run_share, dispatcher, chunks, "full slots", "hot", FLOAT
    )
    sent = [engine.transport.traffic.drain() for *_, engine in results]
    total = {key: [sum(s[key][i] for s in sent) for i in (0, 1)] for key in sent[0]}

    # Dispatch and combine, forward and backward: the same rows four times.
    rows = rows_of(dispatcher, rank_TK_of)
    for name, number in rows.items():
        back_and_forth = 4 * number
        assert total["token", name] == [back_and_forth, back_and_forth * D * FP32], name

    if dispatcher != "alltoall":  # what the layer reports, and what a modelled time prices
        cluster = load_cluster("h800_4x8").resized(R, PER_NODE)
        traffic = row_traffic(results[0][2].rows_RX, cluster, dispatcher)
        assert [int(part.sum()) for part in traffic] == [rows["far"], rows["near"]]

    # One expert's three matrices to each replica slot, and their gradients back. The layer was the
    # only one to use the slots, so backward found its replicas there and pulled none again.
    copies = {"own": 0, "near": 0, "far": 0}
    home_E, per_rank = shuffled_mains(R).tolist(), E // R + S
    for g, expert in enumerate(plan.expert_G.tolist()):
        if expert >= 0 and g % per_rank >= E // R:
            copies[link(home_E[expert], g // per_rank)] += 1
    assert copies["near"] > 0 < copies["far"]
    for name, number in copies.items():
        for kind in ("parameter", "gradient"):
            assert total[kind, name] == [3 * number, number * 3 * D * F * FP32]

    # Beside the rows: the load (E int64), a hash, the counts of the deduplicating dispatchers; per
    # hop a score and its gradient (alltoall), or (row, slot, score) and the gradient.
    assignments = sum(TOKENS[:R]) * K
    counts = 0 if dispatcher == "alltoall" else 8 * chunks * (R * per_rank + R + R // PER_NODE)
    gathered = R * R * (8 * E + 8 + counts)
    each = {"alltoall": 4 + 4, "dedup": 12 + 4, "dedup-node": 2 * (12 + 4)}[dispatcher]
    metadata = sum(total["metadata", name][1] for name in ("own", "near", "far"))
    assert metadata == gathered + each * assignments
