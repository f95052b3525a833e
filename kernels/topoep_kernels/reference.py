"""The row kernels as PyTorch expressions: what they mean, and what they are compared with.

Letters: N elements, B buckets, S source rows, T tokens, K choices, G slots, A assignments, P places
(ranks or nodes), D columns. Names and arguments are those of ``rows.py``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def bucket(key_N: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
    sorted_N, order_N = torch.sort(key_N, stable=True)
    boundary_B = torch.arange(buckets + 1, device=key_N.device)
    return order_N, torch.searchsorted(sorted_N, boundary_B)


def assign(ids_TK: Tensor, expert_G: Tensor, split_G: Tensor, experts: int) -> Tensor:
    order_N = torch.argsort(ids_TK.reshape(-1), stable=True)
    slot_order_G = torch.argsort(expert_G, stable=True)  # empty slots first, with count 0
    slot_N = torch.repeat_interleave(
        slot_order_G, split_G[slot_order_G].long(), output_size=order_N.numel()
    )
    slot_TK = torch.empty_like(order_N)
    slot_TK[order_N] = slot_N
    return slot_TK.view(ids_TK.shape)


def gather(source_SD: Tensor, index_N: Tensor) -> Tensor:
    return source_SD[index_N]


def combine(
    rows_ND: Tensor, order_N: Tensor, offset_S: Tensor, weight_N: Tensor | None = None
) -> Tensor:
    wide_ND = rows_ND.to(torch.promote_types(rows_ND.dtype, torch.float32))  # rounded once, at last
    if weight_N is not None:
        wide_ND = wide_ND * weight_N.unsqueeze(1)
    sums_SD = F.embedding_bag(order_N, wide_ND, offset_S, mode="sum", include_last_offset=True)
    return sums_SD.to(rows_ND.dtype)


def dedup(
    target_A: Tensor, row_A: Tensor, targets: int, rows_out: int
) -> tuple[Tensor, Tensor, Tensor]:
    order_A = torch.argsort(target_A, stable=True)
    pairs_A2 = torch.stack([target_A, row_A], 1)[order_A]
    new_A = torch.ones_like(target_A)
    new_A[1:] = (pairs_A2[1:] != pairs_A2[:-1]).any(1)
    pair_A = new_A.cumsum(0) - 1
    index_N = torch.empty(rows_out, dtype=torch.int64, device=target_A.device)
    index_N[pair_A] = pairs_A2[:, 1]  # repeated writes are alike
    return order_A, pair_A, index_N


def count_rows(slot_TK: Tensor, places: int, slots_per_place: int) -> Tensor:
    place_TK = slot_TK // slots_per_place
    hit_TP = torch.zeros(len(slot_TK), places, dtype=torch.int64, device=slot_TK.device)
    return hit_TP.scatter_(1, place_TK, 1).sum(0)
