"""Replica transfers of virtual ranks in one process: what arrives, and what is left alone."""

import pytest
import torch
from topoep_kernels import transfers

from tests.kernels.simt_machine import SCHEDULES, counters, schedule
from tests.native_library import build_or_skip

R, E, S, D, F = 4, 8, 2, 64, 200  # parts of 50 KB in fp32: two chunks, the second a partial one
MAIN_E = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0])
# Slots of ranks 0..3: mains ascending, then replicas. Rank 1 hosts 3 and 0, rank 2 none.
EXPERT_G = torch.tensor([0, 7, 5, -1, 1, 6, 3, 0, 2, 5, -1, -1, 3, 4, 0, 5], dtype=torch.int32)


@pytest.fixture(scope="module", autouse=True)
def _library():
    build_or_skip()


def aligned(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)  # nothing may read what was not written


def weights(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(E, *shape, generator=generator) for shape in ((F, D), (D, F), (F, D))]


def table(buffers: list[list[torch.Tensor]], reachable=range(R)) -> torch.Tensor:
    """(P, R) addresses from buffers[rank][part]."""
    return transfers.addresses(
        [[buffers[r][p].data_ptr() if r in reachable else 0 for r in range(R)] for p in range(3)],
        torch.device("cpu"),
    )


def own(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Addresses of the parts, and the bytes of one expert's part."""
    addresses = transfers.addresses([t.data_ptr() for t in tensors], torch.device("cpu"))
    return addresses, tensors[0][0].nbytes


def hosted(rank: int) -> list[tuple[int, int]]:
    """(slot, expert) of the replicas of a rank."""
    experts = EXPERT_G.view(R, -1)[rank, E // R :].tolist()
    return [(slot, expert) for slot, expert in enumerate(experts) if expert >= 0]


@pytest.mark.parametrize("order", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [1, 16])  # one block: its ring goes round three times
def test_replicas_come_from_their_mains(blocks, order, dtype, monkeypatch):
    monkeypatch.setattr(transfers, "BLOCKS", blocks)
    every = [w.to(dtype) for w in weights(0)]
    mains = [[w[r == MAIN_E].contiguous() for w in every] for r in range(R)]
    place_E = transfers.main_places(MAIN_E)
    for rank in range(R):
        slots = [aligned(S, *w.shape[1:], dtype=dtype) for w in every]
        with schedule(order, rank):
            transfers.pull_replicas(EXPERT_G, place_E, table(mains), *own(slots), rank)
        filled = dict(hosted(rank))
        for slot in range(S):
            for part, weight in zip(slots, every):
                if slot in filled:
                    assert torch.equal(part[slot], weight[filled[slot]])
                else:
                    assert part[slot].isnan().all()
    assert counters()["bulk_copies"] == 2 * len(hosted(R - 1)) * 3 * (
        2 if dtype.itemsize == 4 else 1
    )


def test_ranks_that_are_not_mapped_are_left_out():
    mains = [[w[r == MAIN_E].contiguous() for w in weights(0)] for r in range(R)]
    slots = [aligned(S, *w.shape[1:]) for w in weights(0)]
    reachable = table(mains, reachable=(0, 1))
    transfers.pull_replicas(EXPERT_G, transfers.main_places(MAIN_E), reachable, *own(slots), 1)
    assert slots[0][0].isnan().all()  # expert 3, of rank 3
    assert torch.equal(slots[0][1], weights(0)[0][0])  # expert 0, of rank 0


@pytest.mark.parametrize("order", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_go_home_and_are_summed_in_rank_order(order, dtype):
    grads = [[g[:S].to(dtype).contiguous() for g in weights(r + 1)] for r in range(R)]
    regions = [
        [aligned(R, E // R, *g.shape[1:], dtype=dtype) for g in weights(0)] for _ in range(R)
    ]
    place_E = transfers.main_places(MAIN_E)
    with schedule(order, 1):
        for rank in range(R):
            transfers.push_gradients(EXPERT_G, place_E, table(regions), *own(grads[rank]), rank)
        for rank in range(R):
            for part in range(3):
                total = weights(9)[part][: E // R].contiguous()
                expected = total.clone()
                transfers.reduce_gradients(total, regions[rank][part], EXPERT_G, rank)
                for index, expert in enumerate((rank == MAIN_E).nonzero().flatten().tolist()):
                    for host in range(R):
                        for slot, replica in hosted(host):
                            if replica == expert:
                                expected[index] += grads[host][part][slot].float()
                assert torch.equal(total, expected)  # a NaN, had an empty region been read


def test_sizes_that_cannot_be_moved_are_refused():
    odd = [torch.zeros(S, 3) for _ in range(3)]
    with pytest.raises(ValueError, match="multiples of 16"):
        transfers.pull_replicas(
            EXPERT_G, transfers.main_places(MAIN_E), table([odd] * R), *own(odd), 0
        )
    with pytest.raises(ValueError, match="multiple of 4"):
        transfers.reduce_gradients(torch.zeros(2, 3), torch.zeros(4, 2, 3), EXPERT_G, 0)
