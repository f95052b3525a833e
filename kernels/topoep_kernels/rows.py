"""Row kernels as PyTorch operators: what execution does with tokens between two exchanges.

Letters: N elements, B buckets, S source rows, T tokens, K choices, G slots, A assignments, P places
(ranks or nodes), D columns. Indices and counts are int64. ``reference.py`` says what each means.

``torch.ops.topoep.*`` run natively on CPU tensors and as kernels on CUDA tensors, to the same bits,
and have fake implementations; ``gather`` and ``combine`` have gradients. On the CPU an index out of
range raises ValueError; on CUDA indices are trusted.
"""

from ctypes import c_longlong, c_void_p

import torch
from torch import Tensor

from topoep_kernels import rows_device
from topoep_kernels.library import cpu_library
from topoep_kernels.rows_device import KINDS

_library = torch.library.Library("topoep", "DEF")


def bucket(key_N: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
    """(order (N,), offset (B + 1,)): positions by ascending key, equal keys in order; where each
    bucket begins. The counts are ``offset.diff()``. Keys lie in [0, buckets)."""
    return torch.ops.topoep.bucket(key_N, buckets)


def assign(ids_TK: Tensor, expert_G: Tensor, split_G: Tensor, experts: int) -> Tensor:
    """int64 (T, K): the slot that executes each assignment of one source (the cut rule).

    ``expert_G`` int32: the Plan's; ``split_G`` int32: the source's row of ``assignments_RG``.
    """
    return torch.ops.topoep.assign(ids_TK, expert_G, split_G, experts)


def gather(source_SD: Tensor, index_N: Tensor) -> Tensor:
    """(N, D): source rows by index, of any dtype."""
    return torch.ops.topoep.gather(source_SD, index_N)


def combine(
    rows_ND: Tensor, order_N: Tensor, offset_S: Tensor, weight_N: Tensor | None = None
) -> Tensor:
    """(S, D): sums of ``weight_N[n] * rows_ND[n]`` over n in ``order_N[offset[s]:offset[s + 1]]``,
    in this order, in fp32 (float64 for float64), rounded once: repeatable bit for bit.

    float32, bfloat16 or float64; ``weight_N`` in the dtype of the sums.
    """
    return torch.ops.topoep.combine(rows_ND, order_N, offset_S, weight_N)


def dedup(
    target_A: Tensor, row_A: Tensor, targets: int, rows_out: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(order (A,), pair (A,), index (N,)) of one row for each distinct (target, row).

    ``order``: assignments by target; ``pair``: the row that serves each of these, counted over all
    targets; ``index``: the source row of each of the N = ``rows_out`` rows. ``row_A`` ascends.
    """
    return torch.ops.topoep.dedup(target_A, row_A, targets, rows_out)


def count_rows(slot_TK: Tensor, places: int, slots_per_place: int) -> Tensor:
    """int64 (P,): tokens with at least one of their K slots in each place."""
    return torch.ops.topoep.count_rows(slot_TK, places, slots_per_place)


def _native(name: str, *arguments: Tensor | int | None) -> None:
    """Call ``topoep_rows_<name>`` of the CPU library. Raises ValueError."""
    values = [
        c_void_p(a.data_ptr()) if isinstance(a, Tensor)
        else c_void_p(None) if a is None
        else c_longlong(a)
        for a in arguments
    ]  # fmt: skip
    if getattr(cpu_library(), f"topoep_rows_{name}")(*values):
        shapes = [tuple(a.shape) for a in arguments if isinstance(a, Tensor)]
        raise ValueError(
            f"topoep::{name}: an index lies outside its range, or sizes contradict the indices "
            f"(tensors {shapes}, sizes {[a for a in arguments if isinstance(a, int)]})"
        )


def _cpu_bucket(key_N: Tensor, buckets: int):
    order_N, offset_B = _fake_bucket(key_N, buckets)
    _native("bucket", key_N.contiguous(), key_N.numel(), buckets, order_N, offset_B)
    return order_N, offset_B


def _fake_bucket(key_N: Tensor, buckets: int):
    return torch.empty_like(key_N), key_N.new_empty(buckets + 1)


def _cpu_assign(ids_TK: Tensor, expert_G: Tensor, split_G: Tensor, experts: int):
    slot_TK = _fake_assign(ids_TK, expert_G, split_G, experts)
    ids_TK, expert_G, split_G = ids_TK.contiguous(), expert_G.contiguous(), split_G.contiguous()
    sizes = (ids_TK.numel(), expert_G.numel(), experts)
    _native("assign", ids_TK, expert_G, split_G, *sizes, slot_TK)
    return slot_TK


def _fake_assign(ids_TK: Tensor, expert_G: Tensor, split_G: Tensor, experts: int):
    return ids_TK.new_empty(ids_TK.shape)


def _cpu_gather(source_SD: Tensor, index_N: Tensor):
    out_ND = _fake_gather(source_SD, index_N)
    source_SD = source_SD.contiguous()
    row_bytes = source_SD.element_size() * source_SD[:1].numel()
    sizes = (index_N.numel(), len(source_SD), row_bytes)
    _native("gather", source_SD, index_N.contiguous(), *sizes, out_ND)
    return out_ND


def _fake_gather(source_SD: Tensor, index_N: Tensor):
    return source_SD.new_empty(index_N.numel(), *source_SD.shape[1:])


def _cpu_combine(rows_ND: Tensor, order_N: Tensor, offset_S: Tensor, weight_N: Tensor | None):
    out_SD = _fake_combine(rows_ND, order_N, offset_S, weight_N)
    sizes = (len(rows_ND), len(out_SD), rows_ND.shape[1], rows_device.kind_of(rows_ND, weight_N))
    weight_N = None if weight_N is None else weight_N.contiguous()
    order_N, offset_S = order_N.contiguous(), offset_S.contiguous()
    _native("sum", rows_ND.contiguous(), order_N, offset_S, weight_N, *sizes, out_SD)
    return out_SD


def _fake_combine(rows_ND: Tensor, order_N: Tensor, offset_S: Tensor, weight_N: Tensor | None):
    return rows_ND.new_empty(offset_S.numel() - 1, rows_ND.shape[1])


def _cpu_dedup(target_A: Tensor, row_A: Tensor, targets: int, rows_out: int):
    outs = _fake_dedup(target_A, row_A, targets, rows_out)
    sizes = (target_A.numel(), targets, rows_out)
    _native("dedup", target_A.contiguous(), row_A.contiguous(), *sizes, *outs)
    return outs


def _fake_dedup(target_A: Tensor, row_A: Tensor, targets: int, rows_out: int):
    return torch.empty_like(target_A), torch.empty_like(target_A), target_A.new_empty(rows_out)


def _cpu_count_rows(slot_TK: Tensor, places: int, slots_per_place: int):
    rows_P = _fake_count_rows(slot_TK, places, slots_per_place)
    _native("count", slot_TK.contiguous(), *slot_TK.shape, places, slots_per_place, rows_P)
    return rows_P


def _fake_count_rows(slot_TK: Tensor, places: int, slots_per_place: int):
    return slot_TK.new_empty(places)


def _gather_context(ctx, inputs, output):
    source_SD, index_N = inputs
    ctx.source_rows = len(source_SD)
    ctx.save_for_backward(index_N)


def _gather_backward(ctx, grad_ND):
    (index_N,) = ctx.saved_tensors
    return combine(grad_ND.contiguous(), *bucket(index_N, ctx.source_rows)), None


def _combine_context(ctx, inputs, output):
    rows_ND, order_N, offset_S, weight_N = inputs
    ctx.rows = len(rows_ND)
    ctx.save_for_backward(order_N, offset_S, weight_N, rows_ND if weight_N is not None else None)


def _combine_backward(ctx, grad_SD):
    order_N, offset_S, weight_N, rows_ND = ctx.saved_tensors
    source_N = torch.repeat_interleave(
        torch.arange(len(offset_S) - 1, device=grad_SD.device), offset_S.diff(),
        output_size=order_N.numel(),
    )  # fmt: skip
    taken_ND = grad_SD.new_zeros(ctx.rows, grad_SD.shape[1])
    taken_ND[order_N] = grad_SD[source_N]
    if weight_N is None:
        return taken_ND, None, None, None
    grad_weight_N = (taken_ND.to(weight_N.dtype) * rows_ND.to(weight_N.dtype)).sum(1)
    return (taken_ND * weight_N.unsqueeze(1)).to(taken_ND.dtype), None, None, grad_weight_N


for _schema, _cpu, _cuda, _fake in (
    (
        "bucket(Tensor key_N, int buckets) -> (Tensor, Tensor)",
        _cpu_bucket, rows_device.bucket, _fake_bucket,
    ),
    (
        "assign(Tensor ids_TK, Tensor expert_G, Tensor split_G, int experts) -> Tensor",
        _cpu_assign, rows_device.assign, _fake_assign,
    ),
    (
        "gather(Tensor source_SD, Tensor index_N) -> Tensor",
        _cpu_gather, rows_device.gather, _fake_gather,
    ),
    (
        "combine(Tensor rows_ND, Tensor order_N, Tensor offset_S, Tensor? weight_N) -> Tensor",
        _cpu_combine, rows_device.combine, _fake_combine,
    ),
    (
        "dedup(Tensor target_A, Tensor row_A, int targets, int rows_out) "
        "-> (Tensor, Tensor, Tensor)",
        _cpu_dedup, rows_device.dedup, _fake_dedup,
    ),
    (
        "count_rows(Tensor slot_TK, int places, int slots_per_place) -> Tensor",
        _cpu_count_rows, rows_device.count_rows, _fake_count_rows,
    ),
):  # fmt: skip
    _library.define(_schema)
    _name = _schema.split("(")[0]
    _library.impl(_name, _cpu, "CPU")
    _library.impl(_name, _cuda, "CUDA")
    torch.library.register_fake(f"topoep::{_name}", _fake, lib=_library)
torch.library.register_autograd(
    "topoep::gather", _gather_backward, setup_context=_gather_context, lib=_library
)
torch.library.register_autograd(
    "topoep::combine", _combine_backward, setup_context=_combine_context, lib=_library
)

__all__ = ["KINDS", "assign", "bucket", "combine", "count_rows", "dedup", "gather"]
