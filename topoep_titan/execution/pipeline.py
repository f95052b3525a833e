"""The routed experts as one autograd function, its communication beside its computation.

Letters: T tokens of this rank, K top-k, e main experts a rank, S replica slots, M assignments that
this rank executes, D width, F expert width. "c1", "c2": the chunks; with one chunk, c1 alone.

    forward    lane     pull | dispatch c1 | dispatch c2 | combine c1 | combine c2
               compute        experts c1 (mains, then replicas) | experts c2 | sum per token
    backward   lane     pull again | dispatch c1 | dispatch c2 | combine c1 | combine c2 | push
               compute        Dgrad c1 | Wgrad c1 | Dgrad c2 | Wgrad c2 | sum per token

(TopoEP paper, Figures 7 and 8.) "Dispatch" and "combine" carry output gradients and token gradients
in backward. Combining c1 starts before c2 is computed, and in backward before Wgrad c1. Kept for
backward: the arrived rows and scores, and h1, h3 of each executed assignment; no replica, and no
copy of a main.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from topoep_titan.execution.buffers import Buffers, Experts
from topoep_titan.execution.dispatchers import Dispatch
from topoep_titan.execution.experts import (
    Matmuls,
    experts_dgrad,
    experts_forward,
    experts_wgrad,
)
from topoep_titan.execution.hops import (
    Route,
    first_take,
    rows_along,
    rows_and_values_back,
    rows_back,
)
from topoep_titan.execution.lane import StreamLane, ThreadLane
from topoep_titan.execution.replicas import Copies, add_arrived
from topoep_titan.execution.transport import Transport


@dataclass(frozen=True)
class Call:
    """One call of one layer, planned."""

    chunks: Sequence[Dispatch]
    copies: Copies | None  # None when the plan has no replica
    placement: tuple  # (layer, placement): equal for two calls that pull the same replicas
    compute_dtype: torch.dtype
    matmuls: Matmuls
    transport: Transport
    lane: ThreadLane | StreamLane
    buffers: Buffers


def routed_experts(
    x_TD: Tensor, scores_TK: Tensor, weights: tuple[Tensor, Tensor, Tensor], call: Call
) -> Tensor:
    """(T, D) in the dtype of ``x_TD``: every token through its experts, weighted by its scores.

    ``weights``: w1 (e, F, D), w2 (e, D, F), w3 (e, F, D) of this rank's mains. Differentiable in x,
    scores and weights. Collective, forward and backward.
    """
    return _RoutedExperts.apply(x_TD, scores_TK, *weights, call)


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, scores_TK, w1_eFD, w2_eDF, w3_eFD, call: Call):
        weights = (w1_eFD, w2_eDF, w3_eFD)
        out_TD, routes, saved = _forward(x_TD, scores_TK, weights, call)
        ctx.call, ctx.routes = call, routes
        ctx.x_dtype, ctx.scores_like = x_TD.dtype, (scores_TK.shape, scores_TK.dtype)
        ctx.save_for_backward(*weights, *(tensor for chunk in saved for tensor in chunk))
        return out_TD

    @staticmethod
    def backward(ctx, grad_TD):
        tensors = ctx.saved_tensors  # once: activation checkpointing runs forward again here
        weights, flat = tensors[:3], tensors[3:]
        each = len(flat) // len(ctx.routes)
        saved = [flat[i : i + each] for i in range(0, len(flat), each)]
        grad_x_TD, grad_score_N, grads = _backward(grad_TD, weights, ctx.routes, saved, ctx.call)
        shape, dtype = ctx.scores_like
        return grad_x_TD.to(ctx.x_dtype), grad_score_N.view(shape).to(dtype), *grads, None


def _forward(x_TD: Tensor, scores_TK: Tensor, weights: Experts, call: Call):
    """(output, route of each chunk, tensors that backward needs of each chunk)."""
    transport, lane, buffers = call.transport, call.lane, call.buffers
    mains = buffers.main_parameters(weights)
    pulled = None
    if call.copies is not None:
        pulled = lane.submit("pull", transport.pull, call.copies, mains, buffers.slots)
        buffers.held = call.placement
    rows_TD = x_TD.to(call.compute_dtype)
    score_N = scores_TK.reshape(-1).to(wide(call.compute_dtype))
    arrivals = [
        lane.submit(f"dispatch c{i}", _dispatch, chunk, rows_TD, score_N)
        for i, chunk in enumerate(call.chunks, 1)
    ]

    routes, saved, returns = [], [], []
    for i, arrival in enumerate(arrivals, 1):
        route, arrived, x_MD, score_M = arrival.result()
        outputs, hidden = [], []
        with record_function(f"experts c{i}"):
            for rows, rows_X, experts in _parts(route, mains, call.copies and buffers.slots):
                if experts is buffers.slots:
                    pulled.result()
                y_MD, h1_MF, h3_MF = experts_forward(
                    x_MD[rows], score_M[rows], rows_X, experts, call.matmuls
                )
                outputs.append(y_MD)
                hidden += [h1_MF, h3_MF]
        y_MD = _joined(outputs)
        returns.append(lane.submit(f"combine c{i}", rows_back, route, y_MD, transport))
        routes.append(route)
        saved.append((arrived, score_M, *hidden))
    rows = _joined([pending.result() for pending in returns])
    return first_take(routes).sums(rows).to(x_TD.dtype), routes, saved


def _backward(grad_TD: Tensor, weights: Experts, routes: list[Route], saved: list, call: Call):
    """(gradient of x in the compute dtype, of the scores (T*K,), of w1, w2, w3)."""
    transport, lane, buffers = call.transport, call.lane, call.buffers
    mains = buffers.main_parameters(weights)
    # Slots that still hold this call's replicas (it was the last one, or activation checkpointing
    # has just run it again) are not pulled a second time; gradients then go to staging.
    replicas, replica_grads, pulled = buffers.staging, buffers.slots, None
    if call.copies is not None:
        if buffers.held == call.placement:
            replicas, replica_grads = buffers.slots, buffers.staging
        else:
            pulled = lane.submit("pull again", transport.pull, call.copies, mains, replicas)
            buffers.held = None
    rows_TD = grad_TD.to(call.compute_dtype)
    arrivals = [
        lane.submit(f"dispatch c{i}", _dispatch_grads, route, rows_TD, chunk[0], transport)
        for i, (route, chunk) in enumerate(zip(routes, saved), 1)
    ]

    returns, totals = [], {}
    for i, (route, chunk, arrival) in enumerate(zip(routes, saved, arrivals), 1):
        _, score_M, *hidden = chunk
        grad_MD, x_MD = arrival.result()
        parts = _parts(route, mains, call.copies and replicas)
        dgrads = []
        with record_function(f"Dgrad c{i}"):
            for (rows, rows_X, experts), h1_MF, h3_MF in zip(parts, hidden[::2], hidden[1::2]):
                if experts is replicas and pulled is not None:
                    pulled.result()
                dgrads.append(
                    experts_dgrad(
                        grad_MD[rows], score_M[rows], h1_MF, h3_MF, rows_X, experts, call.matmuls
                    )
                )
            grad_x_MD = _joined([grad_x for grad_x, _, _ in dgrads])
            grad_score_M = _joined([grad_score for _, grad_score, _ in dgrads])
        returns.append(
            lane.submit(
                f"combine c{i}", rows_and_values_back, route, grad_x_MD, grad_score_M, transport
            )
        )
        with record_function(f"Wgrad c{i}"):
            for part, ((rows, rows_X, _), (_, _, left)) in enumerate(zip(parts, dgrads)):
                grads = experts_wgrad(x_MD[rows], grad_MD[rows], left, rows_X, call.matmuls)
                totals[part] = _added(totals.get(part), grads)

    pushed = None
    if call.copies is not None:
        for buffer, total in zip(replica_grads, totals[1]):
            buffer.copy_(total)
        pushed = lane.submit("push", transport.push, call.copies, replica_grads, buffers.regions)
    rows, values = zip(*(pending.result() for pending in returns))
    grad_x_TD = first_take(routes).sums(_joined(rows))
    score_order_N = torch.cat([route.hops[0].order_A for route in routes])
    grad_score_N = torch.empty_like(_joined(values))
    grad_score_N[score_order_N] = _joined(values)
    if pushed is not None:
        pushed.result()
        for total, region in zip(totals[0], buffers.regions):
            add_arrived(total, region, call.copies, transport.rank)
    grads = [total.to(weight.dtype) for total, weight in zip(totals[0], weights)]
    return grad_x_TD, grad_score_N, grads


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and of sums of gradients: float32, or float64 in a float64 layer."""
    return torch.promote_types(dtype, torch.float32)


def _dispatch(chunk: Dispatch, x_TD: Tensor, score_N: Tensor):
    route, arrived, score_M = chunk(x_TD, score_N)
    return route, arrived, route.expand.rows(arrived), score_M


def _dispatch_grads(route: Route, grad_TD: Tensor, arrived: Tensor, transport: Transport):
    arrived_grads = rows_along(route, grad_TD, transport)
    return route.expand.rows(arrived_grads), route.expand.rows(arrived)


def _parts(route: Route, mains: Experts, replicas: Experts | None):
    """(executed rows, rows of each expert, experts) of the mains, and of the replicas if any."""
    num_mains = len(mains[0])
    split = sum(route.rows_P[:num_mains])
    parts = [(slice(0, split), route.rows_P[:num_mains], mains)]
    if replicas is not None:
        parts.append((slice(split, None), route.rows_P[num_mains:], replicas))
    return parts


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors))


def _added(total: list[Tensor] | None, grads: Sequence[Tensor]) -> list[Tensor]:
    if total is None:
        return [grad.to(wide(grad.dtype)) for grad in grads]
    return [part.add_(grad) for part, grad in zip(total, grads)]
