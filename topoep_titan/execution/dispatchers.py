"""How tokens travel: ``alltoall``, ``dedup`` and ``dedup-node``, each as chunks of a route.

Letters: R ranks, m nodes, G slots, P = e+S slots of one rank, C chunks, T tokens of this rank,
K top-k, A assignments, N rows sent, M assignments executed, D width.

    alltoall     one row per assignment. Counts and slots follow from the plan: nothing else travels
                 but the scores.
    dedup        one row per (token, rank), with (row, slot, score) of each assignment beside it.
    dedup-node   one row per (token, node) to the rank of that node with the source's local index
                 (the relay), and from there one row per (row, rank).

Row counts of the last two depend on each token's set of experts: one all-gather of every rank's
counts, for all chunks, gives the split sizes of every hop. Chunk 1 of two is the first ceil(n/2)
of each (source, slot) interval of n assignments (alltoall), or tokens [0, ceil(T/2)).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from topoep_titan.execution.hops import Hop, Route, Take
from topoep_titan.execution.row_kernels import kernels_for
from topoep_titan.execution.transport import Parcel, Transport, to_host
from topoep_titan.planning.plan import Plan

# What one chunk does with (x_TD, score_N): its route, the rows and the scores that arrived.
Dispatch = Callable[[Tensor, Tensor], tuple[Route, Tensor, Tensor]]


def plan_chunks(
    dispatcher: str, plan: Plan, slot_TK: Tensor, transport: Transport, chunks: int
) -> tuple[list[Dispatch], Tensor | None]:
    """One dispatch call for each chunk of this rank's assignments under ``plan`` (on the CPU); and
    of a deduplicating dispatcher int64 (R, R + m), the rows of each source to each rank and node.

    ``slot_TK``: int64, the slot that executes each assignment, as many in each as planned.
    Collective for the deduplicating dispatchers, and so are the calls: all ranks must make them in
    the same order. A call maps x (T, D) and scores (T*K,) to the chunk's route, the arrived rows
    (before ``route.expand``) and the score of each executed assignment (M,).
    """
    if dispatcher == "alltoall":
        return _alltoall_chunks(plan, slot_TK, transport, chunks), None
    return _dedup_chunks(dispatcher, plan, slot_TK, transport, chunks)


def _alltoall_chunks(
    plan: Plan, slot_TK: Tensor, transport: Transport, chunks: int
) -> list[Dispatch]:
    device, top_k = slot_TK.device, slot_TK.shape[1]
    counts_RG = plan.assignments_RG.long()
    parts_RG = [counts_RG] if chunks == 1 else [(counts_RG + 1) // 2, counts_RG // 2]
    kernels = kernels_for(device)
    order_N, _ = kernels.bucket(slot_TK.reshape(-1), counts_RG.shape[1])
    if chunks == 2:
        own_G = counts_RG[transport.rank].to(device)
        slot_N = slot_TK.reshape(-1)[order_N]
        position_N = torch.arange(slot_N.numel(), device=device) - (own_G.cumsum(0) - own_G)[slot_N]
        second_N = position_N >= parts_RG[0][transport.rank].to(device)[slot_N]
        order_N = order_N[kernels.bucket(second_N.long(), 2)[0]]

    calls, begin = [], 0
    for part_RG in parts_RG:
        sent_RRP = part_RG.view(transport.ranks, transport.ranks, -1)
        arriving_RP = sent_RRP[:, transport.rank]
        send, receive = sent_RRP[transport.rank].sum(1).tolist(), arriving_RP.sum(1).tolist()
        order_A = order_N[begin : begin + sum(send)]
        begin += sum(send)
        ranks, slots = arriving_RP.shape
        slot_M = torch.repeat_interleave(
            torch.arange(slots, device=device).repeat(ranks),
            arriving_RP.reshape(-1).to(device),
            output_size=sum(receive),
        )
        arrival_M, _ = kernels.bucket(slot_M, slots)  # (source, slot) to (slot, source)
        hop = Hop(Take(order_A // top_k, len(slot_TK)), send, receive, order_A, send, receive)
        route = Route(
            hops=(hop,),
            expand=Take(arrival_M, sum(receive)),
            order_M=arrival_M,
            rows_P=arriving_RP.sum(0).tolist(),
        )
        calls.append(partial(_alltoall_dispatch, route, transport))
    return calls


def _alltoall_dispatch(
    route: Route, transport: Transport, x_TD: Tensor, score_N: Tensor
) -> tuple[Route, Tensor, Tensor]:
    (hop,) = route.hops
    rows, scores = transport.exchange(
        Parcel("token", hop.take.rows(x_TD), hop.send, hop.receive),
        Parcel("metadata", score_N[hop.order_A], hop.send, hop.receive),
    )
    return route, rows, scores[route.order_M]


@dataclass(frozen=True)
class _Station:
    """Assignments at a station of their way: whose row, for which slot, with which score."""

    rows_ND: Tensor
    row_A: Tensor  # int64: row of this station
    slot_A: Tensor  # int64: global slot
    score_A: Tensor


@dataclass(frozen=True)
class _Splits:
    """Split sizes of one hop: rows and assignments to and from each rank."""

    send: list[int]
    receive: list[int]
    send_A: list[int]
    receive_A: list[int]


def _dedup_chunks(
    dispatcher: str, plan: Plan, slot_TK: Tensor, transport: Transport, chunks: int
) -> tuple[list[Dispatch], Tensor]:
    tokens = len(slot_TK)
    ranks, per_node = transport.ranks, transport.ranks_per_node
    slots = plan.expert_G.numel() // ranks  # P
    middle = (tokens + 1) // 2
    ranges = [(0, tokens)] if chunks == 1 else [(0, middle), (middle, tokens)]
    counts_RCX = to_host(
        transport.gather(
            torch.stack([_counts(slot_TK[a:b], ranks, slots, per_node) for a, b in ranges])
        ),
        transport,
    )

    def counts_of(chunk: int) -> list[list[int]]:
        return [counts_CX[chunk] for counts_CX in counts_RCX]

    calls = [
        partial(
            _dedup_dispatch, *_splits(dispatcher, counts_of(i), transport, slots), slot_TK,
            tokens, transport,
        )
        for i, tokens in enumerate(ranges)
    ]  # fmt: skip
    return calls, torch.tensor(counts_RCX).sum(1)[:, plan.expert_G.numel() :]


def _dedup_dispatch(
    hops: list[_Splits],
    rows_P: list[int],
    slot_TK: Tensor,
    tokens: tuple[int, int],
    transport: Transport,
    x_TD: Tensor,
    score_N: Tensor,
) -> tuple[Route, Tensor, Tensor]:
    """Dispatch tokens [begin, end) over one hop, or over two with a relay between them."""
    top_k, slots = slot_TK.shape[1], len(rows_P)
    first, last = (top_k * token for token in tokens)
    flat_A = torch.arange(first, last, device=x_TD.device)
    station = _Station(x_TD, flat_A // top_k, slot_TK.reshape(-1)[flat_A], score_N[flat_A])
    taken = []
    for splits in hops:
        rank_A = station.slot_A // slots
        if splits is not hops[-1]:  # to the relay: same local index, in the slot's node
            per_node = transport.ranks_per_node
            rank_A = rank_A // per_node * per_node + transport.rank % per_node
        hop, station = _dedup_hop(station, rank_A, splits, transport)
        taken.append(hop)
    # The first hop's assignments are counted from the chunk's first so far.
    taken[0] = replace(taken[0], order_A=taken[0].order_A + first)
    first_slot = transport.rank * slots
    order_M, _ = kernels_for(x_TD.device).bucket(station.slot_A - first_slot, slots)
    expand = Take(station.row_A[order_M], len(station.rows_ND))
    route = Route(tuple(taken), expand, order_M, rows_P)
    return route, station.rows_ND, station.score_A[order_M]


def _counts(slot_TK: Tensor, ranks: int, slots: int, per_node: int) -> Tensor:
    """int64 (G + R + m,): assignments to each slot, rows to each rank, rows to each node."""
    kernels = kernels_for(slot_TK.device)
    return torch.cat(
        [
            kernels.bucket(slot_TK.reshape(-1), ranks * slots)[1].diff(),
            kernels.count_rows(slot_TK, ranks, slots),
            kernels.count_rows(slot_TK, ranks // per_node, slots * per_node),
        ]
    )


def _splits(
    dispatcher: str, counts_RX: list[list[int]], transport: Transport, slots: int
) -> tuple[list[_Splits], list[int]]:
    """Split sizes of each hop, and the rows of this rank's slots, from every rank's counts."""
    ranks, per_node, me = transport.ranks, transport.ranks_per_node, transport.rank
    all_slots = ranks * slots
    slots_RG = [counts[:all_slots] for counts in counts_RX]
    rows_RR = [counts[all_slots : all_slots + ranks] for counts in counts_RX]
    nodes_Rm = [counts[all_slots + ranks :] for counts in counts_RX]
    pairs_RR = [  # assignments from each source to each rank
        [sum(row[r * slots : (r + 1) * slots]) for r in range(ranks)] for row in slots_RG
    ]
    rows_P = [sum(row[g] for row in slots_RG) for g in range(me * slots, (me + 1) * slots)]
    everyone = range(ranks)
    if dispatcher == "dedup":
        direct = _Splits(
            send=rows_RR[me],
            receive=[rows_RR[s][me] for s in everyone],
            send_A=pairs_RR[me],
            receive_A=[pairs_RR[s][me] for s in everyone],
        )
        return [direct], rows_P

    def relayed_by(relay: int, counts_RR: list[list[int]], target: int) -> int:
        """What ``relay`` passes on to ``target`` of its node: that of its fellows in all nodes."""
        return sum(counts_RR[s][target] for s in range(relay % per_node, ranks, per_node))

    def to_node(counts_RR: list[list[int]], source: int, node: int) -> int:
        return sum(counts_RR[source][node * per_node : (node + 1) * per_node])

    fellow = [r % per_node == me % per_node for r in everyone]
    neighbour = [r // per_node == me // per_node for r in everyone]
    node = me // per_node
    across = _Splits(
        send=[nodes_Rm[me][r // per_node] if fellow[r] else 0 for r in everyone],
        receive=[nodes_Rm[r][node] if fellow[r] else 0 for r in everyone],
        send_A=[to_node(pairs_RR, me, r // per_node) if fellow[r] else 0 for r in everyone],
        receive_A=[to_node(pairs_RR, r, node) if fellow[r] else 0 for r in everyone],
    )
    within = _Splits(
        send=[relayed_by(me, rows_RR, r) if neighbour[r] else 0 for r in everyone],
        receive=[relayed_by(r, rows_RR, me) if neighbour[r] else 0 for r in everyone],
        send_A=[relayed_by(me, pairs_RR, r) if neighbour[r] else 0 for r in everyone],
        receive_A=[relayed_by(r, pairs_RR, me) if neighbour[r] else 0 for r in everyone],
    )
    return [across, within], rows_P


def _dedup_hop(
    station: _Station, rank_A: Tensor, splits: _Splits, transport: Transport
) -> tuple[Hop, _Station]:
    """Send each row once to every rank that one of its assignments goes to."""
    device = rank_A.device
    order_A, pair_A, index_N = kernels_for(device).dedup(
        rank_A, station.row_A, transport.ranks, sum(splits.send)
    )
    hop = Hop(
        Take(index_N, len(station.rows_ND)), splits.send, splits.receive,
        order_A, splits.send_A, splits.receive_A,
    )  # fmt: skip
    row_A = pair_A - _starts(splits.send, splits.send_A, device)  # within its message
    labels_A2 = torch.stack([row_A, station.slot_A[order_A]], 1).to(torch.int32)
    score_bits = station.score_A[order_A].unsqueeze(1).view(torch.int32)
    rows, arrived = transport.exchange(
        Parcel("token", hop.take.rows(station.rows_ND), hop.send, hop.receive),
        Parcel("metadata", torch.cat([labels_A2, score_bits], 1), hop.send_A, hop.receive_A),
    )
    start_A = _starts(splits.receive, splits.receive_A, device)
    score_A = arrived[:, 2:].contiguous().view(station.score_A.dtype).squeeze(1)
    return hop, _Station(rows, arrived[:, 0] + start_A, arrived[:, 1].long(), score_A)


def _starts(rows_R: list[int], assignments_R: list[int], device: torch.device) -> Tensor:
    """int64 (A,): for each assignment of R messages in a row, the first row of its message."""
    start_R = torch.tensor(rows_R).cumsum(0) - torch.tensor(rows_R)
    return torch.repeat_interleave(
        start_R.to(device),
        torch.tensor(assignments_R).to(device),
        output_size=sum(assignments_R),
    )
