"""Tokens through DeepEP: physical slots of the plan as its experts. Not yet run on a GPU.

Letters: R ranks, P = e+S slots of one rank, G = R*P, T tokens of this rank, K top-k, N rows that
arrive, A assignments, M assignments that this rank executes, D width.

DeepEP (2.0 or later, ``ElasticBuffer``) takes the experts of a token and their number, and gives
experts [r*P, (r+1)*P) to rank r: the slots of a plan are numbered so. It sends a row once to each
rank, by way of nodes where there are several, and sums what comes back. This module keeps to what
torchtitan's own dispatcher relies on of it:

    dispatch(x, topk_idx=, topk_weights=, num_experts=, num_max_tokens_per_rank=, num_sms=,
             do_expand=False, do_cpu_sync=True)
        -> rows (N, D), slots of this rank (N, K) with -1 for others, weights (N, K), handle, event
    dispatch(x, handle=, num_sms=, do_cpu_sync=False)     the same rows again, of another x
    combine(rows, handle=, topk_weights=)
        -> sums (T, D), weights (T, K) as the ranks that were given them sent them back, event

The buffer comes from torchtitan (``titan/deepep.py``); tests put a stand-in in its place. Without
``debug.deterministic`` rows arrive in any order, and sums over them do not repeat bit for bit. What
DeepEP sends is not counted in ``transport.traffic``; its wait for the host, one each dispatch, is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from topoep_titan.execution.hops import Route, Take
from topoep_titan.execution.row_kernels import kernels_for
from topoep_titan.execution.transport import Transport
from topoep_titan.planning.plan import Plan


@dataclass(frozen=True)
class DeepEPHop:
    """A dispatch that DeepEP made; stands for a ``Hop`` whose rows are the chunk's tokens."""

    buffer: Any
    handle: Any  # what DeepEP knows of the dispatch
    arrived_A: Tensor  # int64: arrived assignments, as positions in (N, K)
    shape_NK: torch.Size
    take: Take  # the chunk's tokens among this rank's
    order_A: Tensor  # int64: the chunk's assignments, token by token

    def forth(self, source_TD: Tensor, transport: Transport) -> Tensor:
        rows_ND, *_ = self.buffer.dispatch(
            self.take.rows(source_TD), handle=self.handle, num_sms=self.handle.num_sms,
            do_cpu_sync=False,
        )  # fmt: skip
        return rows_ND

    def back(
        self, rows_ND: Tensor, value_A: Tensor | None, transport: Transport
    ) -> tuple[Tensor, Tensor | None]:
        """As ``Hop.back``: a row per token of the chunk, summed over ranks, a number per pick."""
        weights_NK = None
        if value_A is not None:
            weights_NK = value_A.new_zeros(self.shape_NK)
            weights_NK.view(-1)[self.arrived_A] = value_A
        sums_TD, sent_TK, _ = self.buffer.combine(
            rows_ND, handle=self.handle, topk_weights=weights_NK
        )
        return sums_TD, None if value_A is None else sent_TK.reshape(-1)


# The dispatcher for which plans in rows are made: DeepEP too sends a row once to each node.
PLANNED_AS = "dedup-node"

# (width D, most tokens of a rank, top-k, slots G) to DeepEP's buffer and the processors to use.
OpenBuffer = Callable[[int, int, int, int], tuple[Any, int]]


def deepep_chunks(
    open_buffer: OpenBuffer,
    plan: Plan,
    slot_TK: Tensor,
    width: int,
    transport: Transport,
    chunks: int,
) -> list[partial]:
    """One dispatch call for each chunk, as ``plan_chunks`` makes them: of two, tokens
    [0, ceil(T/2)) and the others. Collective, like the calls."""
    tokens, top_k = slot_TK.shape
    slots = plan.expert_G.numel()
    # The same number on all ranks: DeepEP lays out its memory by it.
    most = int(plan.assignments_RG.sum(1).max()) // top_k
    buffer, num_sms = open_buffer(width, most, top_k, slots)
    middle = (tokens + 1) // 2
    spans = [(0, tokens)] if chunks == 1 else [(0, middle), (middle, tokens)]
    settings = {
        "num_experts": slots,
        "num_max_tokens_per_rank": most if chunks == 1 else (most + 1) // 2,
        "num_sms": num_sms,
    }
    return [partial(_dispatch, buffer, slot_TK, span, settings, transport) for span in spans]


def _dispatch(
    buffer: Any,
    slot_TK: Tensor,
    span: tuple[int, int],
    settings: dict[str, int],
    transport: Transport,
    x_TD: Tensor,
    score_N: Tensor,
) -> tuple[Route, Tensor, Tensor]:
    first, last = span
    top_k = slot_TK.shape[1]
    take = Take(torch.arange(first, last, device=x_TD.device), len(slot_TK))
    rows_ND, own_NK, score_NK, handle, _ = buffer.dispatch(
        take.rows(x_TD),
        topk_idx=slot_TK[first:last].contiguous(),
        topk_weights=score_N.view(-1, top_k)[first:last].contiguous(),
        **settings,
        do_expand=False,
        do_cpu_sync=True,
    )
    transport.host_syncs += x_TD.is_cuda
    rows_P = list(handle.num_recv_tokens_per_expert_list)  # on the host: nothing else need wait
    arrived_A = torch.nonzero_static(own_NK.view(-1) >= 0, size=sum(rows_P)).squeeze(1)
    own_A = own_NK.view(-1)[arrived_A].long()
    order_M, _ = kernels_for(x_TD.device).bucket(own_A, len(rows_P))
    hop = DeepEPHop(
        buffer, handle, arrived_A, own_NK.shape, take,
        order_A=torch.arange(first * top_k, last * top_k, device=x_TD.device),
    )  # fmt: skip
    picked_M = arrived_A[order_M]
    route = Route((hop,), Take(picked_M // top_k, len(rows_ND)), order_M, rows_P)
    return route, rows_ND, score_NK.view(-1)[picked_M]
