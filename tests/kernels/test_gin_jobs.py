"""Puts and signal counts of the GIN transfers, carried out in one process: no network, no GPU."""

from ctypes import c_longlong, c_void_p

import pytest
import torch
from topoep_kernels.library import cpu_library
from topoep_kernels.transfers import main_places

from tests.kernels.test_transfers import EXPERT_G, MAIN_E, E, R, S, hosted
from tests.native_library import build_or_skip

e, BYTES, PARTS = E // R, 4, 3


@pytest.fixture(scope="module", autouse=True)
def _library():
    build_or_skip()


def model(expert_G, place_E, rank, *, gradients, contexts, expected):
    """(from, to, part, source, target, context) of every put; ``expected`` is (contexts, 2R)."""
    ranks = expected.shape[1] // 2
    mains = place_E.numel() // ranks
    slots = expert_G.numel() // ranks - mains
    puts = torch.empty(ranks * slots * PARTS, 6, dtype=torch.int64)
    sizes = (rank, ranks, mains, slots, BYTES, int(gradients), contexts)
    cpu_library().topoep_gin_model(
        c_void_p(expert_G.data_ptr()), c_void_p(place_E.data_ptr()), *map(c_longlong, sizes),
        c_void_p(puts.data_ptr()), c_void_p(expected.data_ptr()),
    )  # fmt: skip
    return puts[puts[:, 0] >= 0].tolist()


def test_one_replica_by_hand():
    """Two ranks, a main and a slot each; rank 1 hosts expert 0, whose main is on rank 0."""
    expert_G = torch.tensor([0, -1, 1, 0], dtype=torch.int32)
    place_E = torch.tensor([0, 1], dtype=torch.int32)
    expected = torch.zeros(1, 4, dtype=torch.int64)
    pulled = model(expert_G, place_E, 1, gradients=False, contexts=1, expected=expected)
    assert pulled == [[0, 1, part, 0, 0, 0] for part in range(PARTS)]
    assert expected.tolist() == [[3, 0, 0, 0]]  # three puts from rank 0
    pushed = model(expert_G, place_E, 0, gradients=True, contexts=1, expected=expected)
    # From slot 0 of rank 1 to region [1][0] of rank 0, behind the one of rank 0 itself.
    assert pushed == [[1, 0, part, 0, BYTES, 0] for part in range(PARTS)]
    assert expected.tolist() == [[3, 0, 0, 3]]


@pytest.mark.parametrize("contexts", [1, 3, 4, 8])
@pytest.mark.parametrize("gradients", [False, True])
def test_puts_bring_every_copy_and_are_all_waited_for(gradients, contexts):
    """Windows of virtual ranks: mains and slots, or slots and regions, of one int32 an expert."""
    place_E = main_places(MAIN_E)
    mains = torch.tensor([[100 + x for x in range(E) if MAIN_E[x] == r] for r in range(R)])
    grads = torch.tensor([[10 * r + s for s in range(S)] for r in range(R)])
    source = (grads if gradients else mains).expand(PARTS, R, -1)
    target = torch.full((PARTS, R, R * e if gradients else S), -1)
    expected = torch.zeros(R, contexts, 2 * R, dtype=torch.int64)
    signals = torch.zeros_like(expected)
    for _ in range(2):  # running totals
        for rank in range(R):
            puts = model(
                EXPERT_G, place_E, rank, gradients=gradients, contexts=contexts,
                expected=expected[rank],
            )  # fmt: skip
            for start, to, part, at, into, context in puts:
                if start == rank:
                    target[part, to, into // BYTES] = source[part, start, at // BYTES]
                    signals[to, context, gradients * R + start] += 1
    assert torch.equal(signals, expected)
    assert signals.sum() == 2 * PARTS * sum(len(hosted(rank)) for rank in range(R))
    arrived = torch.full_like(target[0], -1)
    for rank in range(R):
        for slot, expert in hosted(rank):
            home, index = divmod(int(place_E[expert]), e)
            if gradients:
                arrived[home, rank * e + index] = grads[rank, slot]
            else:
                arrived[rank, slot] = 100 + expert
    assert all(torch.equal(part, arrived) for part in target)
