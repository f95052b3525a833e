"""The distributed layer equals the one-process float64 oracle, whatever carries it out."""

import pytest
import torch

from tests.execution.layer_cases import (
    errors_of,
    gloo_bits,
    gloo_errors,
    on_virtual_ranks,
    run_share,
)

DISPATCHERS = ("alltoall", "dedup", "dedup-node")
PLANS = ("none", "topoep", "joint", "full slots", "idle replica")


def check(results: list[dict[str, float]], planner: str) -> None:
    for errors in results:
        replicas = errors.pop("replicas")
        assert (replicas > 0) == (planner != "none")
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("routing", ["hot", "one expert"])
@pytest.mark.parametrize("planner", PLANS)
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_loopback_equals_the_oracle(dispatcher, chunks, planner, routing):
    """Four virtual ranks, two to a node, every combination; copies are one-sided."""
    check(on_virtual_ranks(4, 2, errors_of, dispatcher, chunks, planner, routing), planner)


# Over gloo, each pair of (dispatcher, chunks, plan, ranks, ranks a node) at least once.
PAIRS = [
    ("alltoall", 1, "full slots", 4, 2), ("alltoall", 2, "topoep", 4, 4),
    ("alltoall", 2, "none", 2, 1), ("alltoall", 1, "idle replica", 2, 2),
    ("dedup", 1, "topoep", 2, 2), ("dedup", 2, "full slots", 4, 4),
    ("dedup", 1, "none", 4, 2), ("dedup", 2, "idle replica", 4, 1),
    ("dedup-node", 1, "topoep", 4, 2), ("dedup-node", 2, "full slots", 2, 1),
    ("dedup-node", 2, "idle replica", 4, 2), ("dedup-node", 1, "none", 2, 2),
    ("alltoall", 2, "none", 1, 1), ("dedup", 2, "none", 1, 1), ("dedup-node", 1, "none", 1, 1),
    ("dedup-node", 2, "full slots", 4, 4), ("alltoall", 2, "full slots", 4, 1),
    ("dedup-node", 1, "joint", 4, 2), ("dedup", 2, "joint", 4, 2),
]  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize(("dispatcher", "chunks", "planner", "world", "per_node"), PAIRS)
def test_gloo_equals_the_oracle(four_ranks, dispatcher, chunks, planner, world, per_node):
    results = four_ranks.run(gloo_errors, world, per_node, dispatcher, chunks, planner, "hot")
    check(results[:world], planner)


@pytest.mark.ranks
@pytest.mark.parametrize("routing", ["hot", "one expert"])
def test_eight_ranks_equal_the_oracle(eight_ranks, routing):
    results = eight_ranks.run(gloo_errors, 8, 4, "dedup-node", 2, "full slots", routing)
    check(results, "full slots")


@pytest.mark.ranks
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_repeats_bit_for_bit(four_ranks, dtype, dispatcher):
    case = (dtype, dispatcher, 2, "full slots", "hot")
    first, second = (four_ranks.run(gloo_bits, *case) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_two_chunks_give_the_numbers_of_one(dispatcher, dtype, tolerance):
    """Also where parameters are kept in fp32 and experts compute in ``dtype``."""
    one, two = (
        on_virtual_ranks(
            4, 2, run_share, dispatcher, chunks, "full slots", "hot", torch.float32, dtype
        )
        for chunks in (1, 2)
    )
    for (leaves, out_TD, *_), (others, other_TD, *_) in zip(one, two):
        pairs = [(out_TD, other_TD), *((a.grad, b.grad) for a, b in zip(leaves, others))]
        for ours, theirs in pairs:
            assert ours.dtype == theirs.dtype == torch.float32
            if ours.numel():
                assert (ours - theirs).abs().max() <= tolerance * ours.abs().max()
