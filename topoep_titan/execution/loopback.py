"""A group of R virtual ranks in one process, its transport one-sided: for tests, and for R = 1.

Every virtual rank runs in a thread of its own. Copies are reads of the peer's main parameters and
writes into the peer's regions, between fences: what ``symm_mem`` and ``gin`` do with peer-mapped
memory and with put and signal.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from topoep_titan.execution.buffers import empty_each
from topoep_titan.execution.replicas import Copies
from topoep_titan.execution.transport import Parcel, Traffic, bytes_of_row


class Loopback:
    """The shared memory of ``ranks`` virtual ranks."""

    def __init__(self, ranks: int = 1, ranks_per_node: int | None = None, timeout: float = 60):
        self.ranks, self.ranks_per_node = ranks, ranks_per_node or ranks
        self.board: list[Any] = [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=timeout)

    def transport(self, rank: int = 0) -> "LoopbackTransport":
        return LoopbackTransport(self, rank)


class LoopbackTransport:
    """One virtual rank's end."""

    def __init__(self, loopback: Loopback, rank: int):
        self.loopback, self.rank, self.ranks = loopback, rank, loopback.ranks
        self.ranks_per_node = loopback.ranks_per_node
        self.one_sided = self.ranks > 1
        self.traffic = Traffic(rank, self.ranks, self.ranks_per_node)
        self.host_syncs = 0
        self.allocate = empty_each

    def gather(self, values: Tensor) -> Tensor:
        values = values.to(torch.int64)
        self.traffic.count("metadata", [1] * self.ranks, values.nbytes)
        return torch.stack(self._shared(values))

    def exchange(self, *parcels: Parcel) -> list[Tensor]:
        for parcel in parcels:
            self.traffic.count(parcel.kind, parcel.send, bytes_of_row(parcel.rows))
        theirs = self._shared(parcels)
        arrived = []
        for i, parcel in enumerate(parcels):
            messages = [peer[i].rows.split(list(peer[i].send))[self.rank] for peer in theirs]
            assert [len(message) for message in messages] == list(parcel.receive)
            arrived.append(torch.cat(messages))
        self._fence()
        return arrived

    def pull(self, copies: Copies, mains: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
        theirs = self._shared(mains)
        for copy in copies.incoming:
            for slot, main in zip(slots, theirs[copy.peer]):
                slot[copy.slot].copy_(main[copy.main])
        for copy in copies.outgoing:
            self._count("parameter", copy.peer, mains)
        self._fence()

    def push(self, copies: Copies, grads: Sequence[Tensor], regions: Sequence[Tensor]) -> None:
        theirs = self._shared(regions)
        for copy in copies.incoming:
            for grad, region in zip(grads, theirs[copy.peer]):
                region[self.rank, copy.main].copy_(grad[copy.slot])
            self._count("gradient", copy.peer, grads)
        self._fence()

    def _count(self, kind: str, peer: int, experts: Sequence[Tensor]) -> None:
        for tensor in experts:
            self.traffic.count_one(kind, peer, tensor[0].nbytes)

    def _shared(self, mine: Any) -> list[Any]:
        """What every rank shows, in rank order."""
        self.loopback.board[self.rank] = mine
        self._fence()
        shown = list(self.loopback.board)
        self._fence()
        return shown

    def _fence(self) -> None:
        if self.ranks > 1:
            self.loopback.barrier.wait()
