"""What execution needs of the network; the only caller of torch.distributed in this room.

A transport moves rows (dimension 0) between the R ranks of one expert-parallel group and knows
nothing of autograd. ``CollectiveTransport`` works on gloo and NCCL, also for a group of one rank.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Transport(Protocol):
    rank: int
    ranks: int

    def gather_counts(self, counts_E: Tensor) -> Tensor:
        """(E,) of this rank to int64 (R, E) of all ranks, in rank order."""
        ...

    def exchange(self, rows_ND: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """All-to-all: ``send[r]`` leading rows to each rank r in order, ``receive[r]`` from it.

        Returns (sum(receive), D) in source rank order. Zero rows to or from a rank are allowed.
        """
        ...


class CollectiveTransport:
    """torch.distributed collectives on one process group."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)

    def gather_counts(self, counts_E: Tensor) -> Tensor:
        counts_E = counts_E.to(torch.int64).contiguous()
        flat = counts_E.new_empty(self.ranks * counts_E.numel())  # gloo wants the flat form
        dist.all_gather_single(flat, counts_E, group=self.group)
        return flat.view(self.ranks, -1)

    def exchange(self, rows_ND: Tensor, send: list[int], receive: list[int]) -> Tensor:
        received = rows_ND.new_empty(sum(receive), *rows_ND.shape[1:])
        dist.all_to_all_single(received, rows_ND.contiguous(), receive, send, group=self.group)
        return received


class LoopbackTransport:
    """A group of one rank: nothing leaves the process (no expert parallelism, or a test)."""

    rank = 0
    ranks = 1

    def gather_counts(self, counts_E: Tensor) -> Tensor:
        return counts_E.to(torch.int64).unsqueeze(0)

    def exchange(self, rows_ND: Tensor, send: list[int], receive: list[int]) -> Tensor:
        return rows_ND.clone()
