"""Rows on their way: a route is a chain of hops and a local expansion, and runs both ways.

Letters: R ranks, T tokens of this rank, S source rows, N rows sent, A assignments sent or arrived,
M assignments that this rank executes, P slots of one rank, D width.

A hop takes rows by index and exchanges them; assignments (their scores, slots) travel beside the
rows by a permutation of their own, since one row may serve several assignments. The transpose of
taking is a sum: a source row gets the sum of all rows taken from it, in a fixed order and in fp32
(float64 for float64 rows), so that results repeat bit for bit. Forward runs tokens along the chain
and expert outputs back; backward runs output gradients along it and token gradients back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from topoep_titan.execution.row_kernels import kernels_for
from topoep_titan.execution.transport import Parcel, Transport


@dataclass(frozen=True)
class Take:
    """rows_N[i] = source_S[index_N[i]], and its transpose."""

    index_N: Tensor  # int64
    size: int  # S

    def rows(self, source_SD: Tensor) -> Tensor:
        return kernels_for(source_SD.device).gather(source_SD, self.index_N)

    def sums(self, rows_ND: Tensor) -> Tensor:
        """(S, D): the rows taken from each source row, added in ascending position."""
        order_N, offset_S = self._bags
        if rows_ND.is_cuda:
            return kernels_for(rows_ND.device).combine(rows_ND, order_N, offset_S)
        return F.embedding_bag(order_N, rows_ND, offset_S, mode="sum", include_last_offset=True)

    @cached_property
    def _bags(self) -> tuple[Tensor, Tensor]:
        """Positions grouped by source row, and where each group begins (S + 1)."""
        return kernels_for(self.index_N.device).bucket(self.index_N, self.size)


@dataclass(frozen=True)
class Hop:
    """One all-to-all of rows, and of the assignments that they serve."""

    take: Take  # rows sent, by destination rank
    send: Sequence[int]  # R: rows
    receive: Sequence[int]
    order_A: Tensor  # int64: assignments sent, by destination rank
    send_A: Sequence[int]  # R: assignments
    receive_A: Sequence[int]

    def forth(self, source_SD: Tensor, transport: Transport) -> Tensor:
        """Source rows to the rows that arrive."""
        rows_ND = self.take.rows(source_SD)
        return transport.exchange(Parcel("token", rows_ND, self.send, self.receive))[0]

    def back(
        self, rows: Tensor, value_A: Tensor | None, transport: Transport
    ) -> tuple[Tensor, Tensor | None]:
        """Arrived rows, and a number per arrived assignment, to the rows and the order of
        assignments in which they were sent."""
        parcels = [Parcel("token", rows, self.receive, self.send)]
        if value_A is None:
            return transport.exchange(*parcels)[0], None
        parcels.append(Parcel("metadata", value_A, self.receive_A, self.send_A))
        return tuple(transport.exchange(*parcels))


@dataclass(frozen=True)
class Route:
    """The way of one chunk's assignments from this rank, and of those that it executes."""

    hops: tuple[Hop, ...]
    expand: Take  # the arrived row of each executed assignment, by slot
    order_M: Tensor  # int64: executed assignment -> arrived assignment
    rows_P: list[int]  # assignments that each slot of this rank executes


def rows_along(route: Route, rows_SD: Tensor, transport: Transport) -> Tensor:
    """Source rows to the rows that arrive where they are used (before the expansion)."""
    for hop in route.hops:
        rows_SD = hop.forth(rows_SD, transport)
    return rows_SD


def rows_back(route: Route, rows_MD: Tensor, transport: Transport) -> Tensor:
    """One row per executed assignment to one row per row sent by the first hop.

    Every station adds up the rows of what it took once; the source adds last (``Take.sums``).
    """
    rows = route.expand.sums(rows_MD)
    for hop in reversed(route.hops):
        rows, _ = hop.back(rows, None, transport)
        if hop is not route.hops[0]:
            rows = hop.take.sums(rows)
    return rows


def rows_and_values_back(
    route: Route, rows_MD: Tensor, value_M: Tensor, transport: Transport
) -> tuple[Tensor, Tensor]:
    """As ``rows_back``, with one number per executed assignment to its sender.

    The numbers come back in the order of the first hop's ``order_A``.
    """
    rows, values = route.expand.sums(rows_MD), _unpermuted(value_M, route.order_M)
    for hop in reversed(route.hops):
        rows, values = hop.back(rows, values, transport)
        if hop is not route.hops[0]:
            rows, values = hop.take.sums(rows), _unpermuted(values, hop.order_A)
    return rows, values


def first_take(routes: Sequence[Route]) -> Take:
    """The first hops of all chunks as one, to add up what came back for each token."""
    takes = [route.hops[0].take for route in routes]
    return Take(torch.cat([take.index_N for take in takes]), takes[0].size)


def _unpermuted(values_N: Tensor, order_N: Tensor) -> Tensor:
    original = torch.empty_like(values_N)
    original[order_N] = values_N
    return original
