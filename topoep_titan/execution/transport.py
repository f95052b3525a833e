"""What execution needs of the network; with peer_memory.py, the only caller of torch.distributed.

A transport moves rows (dimension 0) and expert copies between the R ranks of one expert-parallel
group, knows nothing of autograd, and counts what it sends. ``CollectiveTransport`` works on gloo
and NCCL; ``one_sided.py`` replaces its expert copies. It reads split sizes on the host: on CUDA
each ``to_host`` waits for the device once, and ``host_syncs`` counts them (one for the load or the
plan, one more for the deduplicating dispatchers).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from topoep_titan.execution.buffers import empty_each
from topoep_titan.execution.replicas import Copies

# token: hidden vectors out and back, and their gradients; metadata: counts, slots, scores and score
# gradients; parameter: experts pulled; gradient: replica gradients pushed.
KINDS = ("token", "metadata", "parameter", "gradient")
LINKS = ("own", "near", "far")  # to this rank itself, within its node, to another node
Kind = Literal["token", "metadata", "parameter", "gradient"]


@dataclass(frozen=True)
class Parcel:
    """Rows of one all-to-all: ``send[r]`` leading rows to each rank r in order, and so on."""

    kind: Kind
    rows: Tensor  # (sum(send), ...)
    send: Sequence[int]  # R
    receive: Sequence[int]  # R


class Traffic:
    """Rows and bytes that one rank sent, by kind and link class, since it was last drained.

    A layer that activation checkpointing runs again sends again, and is counted again.
    """

    def __init__(self, rank: int, ranks: int, ranks_per_node: int):
        node = rank // ranks_per_node
        self.link_R = [
            "own" if r == rank else "near" if r // ranks_per_node == node else "far"
            for r in range(ranks)
        ]
        self.drain()

    def count(self, kind: Kind, send: Sequence[int], row_bytes: int) -> None:
        for link, rows in zip(self.link_R, send):
            total = self.totals[kind, link]
            total[0] += rows
            total[1] += rows * row_bytes

    def count_one(self, kind: Kind, peer: int, nbytes: int) -> None:
        """One row, to ``peer``."""
        total = self.totals[kind, self.link_R[peer]]
        total[0] += 1
        total[1] += nbytes

    def drain(self) -> dict[tuple[str, str], list[int]]:
        """{(kind, link): [rows, bytes]}, and start again from zero."""
        drained = getattr(self, "totals", {})
        self.totals = {(kind, link): [0, 0] for kind in KINDS for link in LINKS}
        return drained


class Transport(Protocol):
    rank: int
    ranks: int
    ranks_per_node: int
    one_sided: bool  # peers reach the buffers of execution/buffers.py; mains must be copied there
    traffic: Traffic
    host_syncs: int

    def allocate(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """Uninitialised memory for ``buffers.py``, where peers can reach it if they have to.

        Collective, with the same shapes on all ranks; once, for the layers of a model."""
        ...

    def gather(self, values: Tensor) -> Tensor:
        """Integers (...) of this rank to int64 (R, ...) of all ranks, in rank order."""
        ...

    def exchange(self, *parcels: Parcel) -> list[Tensor]:
        """All-to-all of every parcel at once; each arrives as (sum(receive), ...) by source rank.

        Zero rows to or from a rank are allowed.
        """
        ...

    def pull(self, copies: Copies, mains: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
        """Parameters (e, ...) of the mains into the replica slots (S, ...) that ``copies`` names.

        Collective: when it returns, this rank's slots are filled and its mains were read.
        """
        ...

    def push(self, copies: Copies, grads: Sequence[Tensor], regions: Sequence[Tensor]) -> None:
        """Replica gradients (S, ...) into the regions (R, e, ...) of the mains' ranks.

        Collective, with a fence on both sides: when it returns, all gradients for this rank lie in
        ``regions[host rank, main]``; no rank writes there before this rank comes to its next push.
        """
        ...


def to_host(values: Tensor, transport: Transport) -> list:
    """``values`` as nested Python integers; waits for the device, which is counted."""
    transport.host_syncs += values.is_cuda
    return values.tolist()


class CollectiveTransport:
    """torch.distributed collectives on one process group."""

    one_sided = False

    def __init__(self, group: ProcessGroup, ranks_per_node: int):
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.ranks_per_node = ranks_per_node
        self.traffic = Traffic(self.rank, self.ranks, ranks_per_node)
        self.host_syncs = 0

    def allocate(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        return empty_each(shapes, dtype, device)

    def gather(self, values: Tensor) -> Tensor:
        values = values.to(torch.int64).contiguous()
        self.traffic.count("metadata", [1] * self.ranks, values.nbytes)
        flat = values.new_empty(self.ranks * values.numel())  # gloo wants the flat form
        dist.all_gather_single(flat, values.reshape(-1), group=self.group)
        return flat.view(self.ranks, *values.shape)

    def exchange(self, *parcels: Parcel) -> list[Tensor]:
        arrived, pending = [], []
        for parcel in parcels:
            rows = parcel.rows.contiguous()
            self.traffic.count(parcel.kind, parcel.send, bytes_of_row(rows))
            arrived.append(rows.new_empty(sum(parcel.receive), *rows.shape[1:]))
            pending.append(
                dist.all_to_all_single(
                    arrived[-1],
                    rows,
                    list(parcel.receive),
                    list(parcel.send),
                    group=self.group,
                    async_op=True,
                )
            )
        for work in pending:
            work.wait()
        return arrived

    def pull(self, copies: Copies, mains: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
        wait_all(self.post_pull(copies, mains, slots))

    def push(self, copies: Copies, grads: Sequence[Tensor], regions: Sequence[Tensor]) -> None:
        wait_all(self.post_push(copies, grads, regions))

    def post_pull(
        self, copies: Copies, mains: Sequence[Tensor], slots: Sequence[Tensor]
    ) -> list[dist.Work]:
        sends = [(main[c.main], c.peer) for c in copies.outgoing for main in mains]
        receives = [(slot[c.slot], c.peer) for c in copies.incoming for slot in slots]
        return self._post("parameter", sends, receives)

    def post_push(
        self, copies: Copies, grads: Sequence[Tensor], regions: Sequence[Tensor]
    ) -> list[dist.Work]:
        sends = [(grad[c.slot], c.peer) for c in copies.incoming for grad in grads]
        receives = [(region[c.peer, c.main], c.peer) for c in copies.outgoing for region in regions]
        return self._post("gradient", sends, receives)

    def _post(self, kind: Kind, sends: list, receives: list) -> list[dist.Work]:
        """Point to point, straight from and to the buffers. Both sides of a pair list their tensors
        in the same order, and number them so."""
        for tensor, peer in sends:
            self.traffic.count_one(kind, peer, tensor.nbytes)
        operations = [
            dist.P2POp(operation, tensor, group=self.group, tag=tag, group_peer=peer)
            for operation, pairs in ((dist.isend, sends), (dist.irecv, receives))
            for tag, (tensor, peer) in _numbered(pairs)
        ]
        return dist.batch_isend_irecv(operations) if operations else []


def wait_all(pending: list[dist.Work]) -> None:
    for work in pending:
        work.wait()


def _numbered(pairs: list[tuple[Tensor, int]]) -> list[tuple[int, tuple[Tensor, int]]]:
    """Each (tensor, peer) with its number among those of the same peer."""
    seen: dict[int, int] = {}
    numbered = []
    for pair in pairs:
        seen[pair[1]] = seen.get(pair[1], -1) + 1
        numbered.append((seen[pair[1]], pair))
    return numbered


def bytes_of_row(rows: Tensor) -> int:
    return rows.element_size() * rows[0:1].numel() if rows.shape[0] else rows.element_size()
