"""Several processes on one GPU, their memory mapped into each other: ``make test-gpu``.

The same function runs here on the CPU, over shared memory. On the GPU it was not yet run.
"""

import os

import pytest
import torch
import torch.distributed as dist

from tests.execution.test_peer_memory import train
from tests.native_library import build_or_skip
from topoep_titan.execution.one_sided import OneSidedTransport
from topoep_titan.execution.transport import CollectiveTransport, Parcel


class Staged(CollectiveTransport):
    """Tokens over gloo by way of the CPU: NCCL does not take two ranks of one GPU."""

    def gather(self, values):
        return CollectiveTransport.gather(self, values.cpu()).to(values.device)

    def exchange(self, *parcels):
        staged = [Parcel(p.kind, p.rows.cpu(), p.send, p.receive) for p in parcels]
        return [
            a.to(p.rows.device)
            for a, p in zip(CollectiveTransport.exchange(self, *staged), parcels)
        ]


class StagedCopies(Staged):
    """Expert copies in the same way."""

    def pull(self, copies, mains, slots):
        theirs = self.shared(mains)
        for copy in copies.incoming:
            for slot, main in zip(slots, theirs[copy.peer]):
                slot[copy.slot] = main[copy.main]

    def push(self, copies, grads, regions):
        theirs = self.shared(grads)
        for copy in copies.outgoing:
            for region, grad in zip(regions, theirs[copy.peer]):
                region[copy.peer, copy.main] = grad[copy.slot]

    def shared(self, mine):
        theirs = [None] * self.ranks
        dist.all_gather_object(theirs, [tensor.cpu() for tensor in mine], group=self.group)
        return [[tensor.to(mine[0].device) for tensor in tensors] for tensors in theirs]


class OneSided(OneSidedTransport):
    gather, exchange = Staged.gather, Staged.exchange

    def _verify(self, *_):
        """Not here: it would copy by NCCL."""


def compare_on(rank: int, ranks: int, device: str):
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # read by torch's rendezvous
    for chunks, recompute in ((1, True), (2, False)):
        transports = (
            OneSided(dist.group.WORLD, ranks, network=False),
            StagedCopies(dist.group.WORLD, ranks),
        )
        ours, expected = (
            train(transport, chunks=chunks, recompute=recompute, device=torch.device(device))
            for transport in transports
        )
        assert ours == expected


@pytest.mark.ranks
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda:0",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            ],
        ),
    ],
)
def test_copies_over_mapped_memory_equal_staged_ones(four_ranks, device):
    """Bit for bit: pulls, pushes, fences and stream order of three steps of two layers."""
    build_or_skip()
    four_ranks.run(compare_on, device)
