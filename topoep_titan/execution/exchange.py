"""Dispatch and combine by all-to-all over physical slots, written as mirror images.

Letters: R ranks, G slots, P = e+S slots of one rank, T tokens of this rank, K top-k, N = T*K
assignments of this rank, M assignments that this rank executes, D width.

Everything about the exchange follows from the plan and this rank's own ids, so no counts travel.
Sums run in a fixed order (over K, per token), so results repeat bit for bit on any device.
Split sizes are host integers: on CUDA this path synchronises with the host once per layer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from topoep_titan.execution.transport import Transport
from topoep_titan.planning.plan import Plan, cut_assignments


@dataclass(frozen=True)
class Route:
    """How one rank's assignments travel under a plan."""

    order_N: Tensor  # int64: assignments sorted by slot; order_N[i] = flat (token, k) index
    send: list[int]  # R: assignments that this rank sends to each rank
    receive: list[int]  # R: assignments that this rank executes for each rank
    arrival_M: Tensor  # int64: arrived rows (source, slot order) sorted by (slot, source)
    rows_P: list[int]  # rows that each slot of this rank executes


def plan_route(plan: Plan, ids_TK: Tensor, transport: Transport) -> Route:
    """The cut rule of the Plan, and the counts of both directions, for this rank."""
    ranks, rank = transport.ranks, transport.rank
    sent_RRP = plan.assignments_RG.view(ranks, ranks, -1)  # source, executing rank, slot
    slot_N = cut_assignments(plan, ids_TK, rank).reshape(-1)
    arriving_RP = sent_RRP[:, rank].long()
    slots = arriving_RP.shape[1]
    slot_M = torch.repeat_interleave(
        torch.arange(slots, device=slot_N.device).repeat(ranks), arriving_RP.reshape(-1)
    )
    return Route(
        order_N=torch.argsort(slot_N, stable=True),
        send=sent_RRP[rank].sum(1).tolist(),
        receive=arriving_RP.sum(1).tolist(),
        arrival_M=torch.argsort(slot_M, stable=True),
        rows_P=arriving_RP.sum(0).tolist(),
    )


def dispatch(x_TD: Tensor, route: Route, top_k: int, transport: Transport) -> Tensor:
    """(T, D) tokens to the (M, D) rows that this rank executes, sorted by slot, then source."""
    rows_ND = _TakeTokens.apply(x_TD, route.order_N, top_k)
    rows_MD = _Exchange.apply(rows_ND, route.send, route.receive, transport)
    return _Permute.apply(rows_MD, route.arrival_M)


def combine(y_MD: Tensor, scores_TK: Tensor, route: Route, transport: Transport) -> Tensor:
    """(M, D) expert outputs back to (T, D): each token's K outputs, weighted by its scores.

    The weighted sum runs in fp32 (float64 when either input is), in the order of ``scores_TK``.
    """
    tokens, top_k = scores_TK.shape
    rows_MD = _Permute.apply(y_MD, _inverse(route.arrival_M))
    rows_ND = _Exchange.apply(rows_MD, route.receive, route.send, transport)
    y_TKD = _Permute.apply(rows_ND, _inverse(route.order_N)).view(tokens, top_k, y_MD.shape[1])
    wide = torch.promote_types(torch.promote_types(y_MD.dtype, scores_TK.dtype), torch.float32)
    return (y_TKD.to(wide) * scores_TK.to(wide).unsqueeze(-1)).sum(1).to(y_MD.dtype)


def _inverse(permutation: Tensor) -> Tensor:
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(permutation.numel(), device=permutation.device)
    return inverse


class _TakeTokens(torch.autograd.Function):
    """rows[i] = x[order[i] // K]; backward adds a token's K gradients in the order of K."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, order_N: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order_N)
        ctx.top_k = top_k
        return x_TD[order_N // top_k]

    @staticmethod
    def backward(ctx, grad_ND: Tensor):
        (order_N,) = ctx.saved_tensors
        unsorted_ND = torch.empty_like(grad_ND)
        unsorted_ND[order_N] = grad_ND
        return unsorted_ND.view(-1, ctx.top_k, grad_ND.shape[1]).sum(1), None, None


class _Permute(torch.autograd.Function):
    """rows[order] for a permutation; backward puts each gradient back, without a sum."""

    @staticmethod
    def forward(ctx, rows_ND: Tensor, order_N: Tensor) -> Tensor:
        ctx.save_for_backward(order_N)
        return rows_ND[order_N]

    @staticmethod
    def backward(ctx, grad_ND: Tensor):
        (order_N,) = ctx.saved_tensors
        unsorted_ND = torch.empty_like(grad_ND)
        unsorted_ND[order_N] = grad_ND
        return unsorted_ND, None


class _Exchange(torch.autograd.Function):
    """Rows out by an all-to-all, their gradients back the same way."""

    @staticmethod
    def forward(ctx, rows_ND: Tensor, send: list[int], receive: list[int], transport: Transport):
        ctx.args = send, receive, transport
        return transport.exchange(rows_ND, send, receive)

    @staticmethod
    def backward(ctx, grad_MD: Tensor):
        send, receive, transport = ctx.args
        return transport.exchange(grad_MD, receive, send), None, None, None
