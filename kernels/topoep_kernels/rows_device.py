"""The row kernels of csrc/device/rows.cu: allocates outputs and scratch, and launches.

Letters as in ``rows.py``. Called with CPU tensors they run in the SIMT machine, for tests.
"""

import torch
from torch import Tensor

from topoep_kernels.device import launch

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
CHUNK = 1024  # kChunk of csrc/device/rows.cu


def kind_of(rows_ND: Tensor, weight_N: Tensor | None) -> int:
    """The number of the rows' dtype; raises ValueError unless it and the weights' are supported."""
    if rows_ND.dtype not in KINDS or rows_ND.ndim != 2:
        raise ValueError(
            f"combine sums (N, D) of float32, bfloat16 or float64, got {tuple(rows_ND.shape)} of "
            f"{rows_ND.dtype}"
        )
    wide = torch.promote_types(rows_ND.dtype, torch.float32)
    if weight_N is not None and (weight_N.dtype != wide or weight_N.shape != rows_ND.shape[:1]):
        raise ValueError(
            f"weights must be ({len(rows_ND)},) of {wide}, got {tuple(weight_N.shape)} of "
            f"{weight_N.dtype}"
        )
    return KINDS[rows_ND.dtype]


def bucket(key_N: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
    key_N = key_N.contiguous()
    size = key_N.numel()
    order_N, offset_B = torch.empty_like(key_N), key_N.new_empty(buckets + 1)
    launch("bucket", key_N, size, buckets, _counts(key_N, size, buckets), order_N, offset_B)
    return order_N, offset_B


def assign(ids_TK: Tensor, expert_G: Tensor, split_G: Tensor, experts: int) -> Tensor:
    ids_TK, slots = ids_TK.contiguous(), expert_G.numel()
    size = ids_TK.numel()
    slot_TK = torch.empty_like(ids_TK)
    counts = _counts(ids_TK, max(size, slots), experts + 1)
    scratch = (ids_TK.new_empty(slots), ids_TK.new_empty(slots), ids_TK.new_empty(experts + 2))
    sizes = (size, slots, experts)
    launch(
        "assign", ids_TK, expert_G.contiguous(), split_G.contiguous(), *sizes, counts, *scratch,
        slot_TK,
    )  # fmt: skip
    return slot_TK


def gather(source_SD: Tensor, index_N: Tensor) -> Tensor:
    source_SD, index_N = source_SD.contiguous(), index_N.contiguous()
    out_ND = source_SD.new_empty(index_N.numel(), *source_SD.shape[1:])
    row_bytes = source_SD.element_size() * source_SD[:1].numel()
    launch("gather", source_SD, index_N, index_N.numel(), row_bytes, out_ND)
    return out_ND


def combine(
    rows_ND: Tensor, order_N: Tensor, offset_S: Tensor, weight_N: Tensor | None = None
) -> Tensor:
    kind = kind_of(rows_ND, weight_N)
    out_SD = rows_ND.new_empty(offset_S.numel() - 1, rows_ND.shape[1])
    weight_N = None if weight_N is None else weight_N.contiguous()
    launch(
        "sum", rows_ND.contiguous(), order_N.contiguous(), offset_S.contiguous(), weight_N,
        *out_SD.shape, kind, out_SD,
    )  # fmt: skip
    return out_SD


def dedup(
    target_A: Tensor, row_A: Tensor, targets: int, rows_out: int
) -> tuple[Tensor, Tensor, Tensor]:
    size = target_A.numel()
    order_A, pair_A = torch.empty_like(target_A), torch.empty_like(target_A)
    index_N, offset_B = target_A.new_empty(rows_out), target_A.new_empty(targets + 1)
    launch(
        "dedup", target_A.contiguous(), row_A.contiguous(), size, targets,
        _counts(target_A, size, targets), offset_B, order_A, pair_A, index_N,
    )  # fmt: skip
    return order_A, pair_A, index_N


def count_rows(slot_TK: Tensor, places: int, slots_per_place: int) -> Tensor:
    rows_P = slot_TK.new_zeros(places)
    launch("count_rows", slot_TK.contiguous(), *slot_TK.shape, slots_per_place, rows_P)
    return rows_P


def _counts(like: Tensor, elements: int, buckets: int) -> Tensor:
    chunks = (elements + CHUNK - 1) // CHUNK
    return like.new_empty(max(chunks * buckets, 1), dtype=torch.int32)
