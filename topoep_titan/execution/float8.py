"""Grouped matmuls in float8 for the experts: mains and replicas alike, since both run through here.

Operands are rounded to e4m3 when they are used, with one scale, a power of two, for every vector
that is summed over (torchao's ``rowwise`` recipe); parameters, replicas on the wire and gradients
stay in the compute dtype. On CUDA each group is padded to ALIGNMENT rows of zeros and multiplied by
``torch._scaled_grouped_mm``; on a CPU the rounded values are multiplied as they are, so that
numerics can be studied. torchao's own grouped matmul is an autograd function that refuses to pad.

Letters: M rows grouped by expert, P padded rows, X experts, A summed over, B result width.
"""

import torch
from torch import Tensor

from topoep_titan.execution.experts import Matmuls, ends_of, matmul_each, outer_each

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
SMALLEST = 1e-12  # a vector below it is scaled as if this were its largest value
ALIGNMENT = 16  # rows of a group; also both widths must be multiples of it


def float8_each(rows_MA: Tensor, weight_XAB: Tensor, rows_X: list[int]) -> Tensor:
    """(M, B) in the dtype of the rows: each group times its expert's matrix."""
    if emulated(rows_MA.device):
        rows, weight = rounded(rows_MA, 1), rounded(weight_XAB, 1)
        return matmul_each(rows, weight, rows_X)
    row_M, padded_X = _padding(rows_X, rows_MA.device)
    rows_PA, scale_P1 = quantized(_padded(rows_MA, row_M, padded_X), 1)
    weight_XBA, scale_XB1 = quantized(weight_XAB.transpose(1, 2).contiguous(), 2)
    out_PB = torch._scaled_grouped_mm(
        rows_PA,
        weight_XBA.transpose(1, 2),  # column-major, as the tensor cores want it
        scale_P1.reciprocal().squeeze(1),
        scale_XB1.reciprocal().squeeze(2),
        offs=ends_of(padded_X, rows_MA.device),
        out_dtype=rows_MA.dtype,
        use_fast_accum=True,
    )
    return out_PB[row_M]


def float8_outer(left_MA: Tensor, right_MB: Tensor, rows_X: list[int]) -> Tensor:
    """(X, A, B) in the dtype of the rows: left^T right of each group, scaled group by group."""
    row_M, padded_X = _padding(rows_X, left_MA.device)
    group_P = torch.arange(len(rows_X)).repeat_interleave(torch.tensor(padded_X))
    group_P = group_P.to(left_MA.device)
    left_PA, left_XA = _by_group(_padded(left_MA, row_M, padded_X), group_P, len(rows_X))
    right_PB, right_XB = _by_group(_padded(right_MB, row_M, padded_X), group_P, len(rows_X))
    if emulated(left_MA.device):
        left = (left_PA.float() / left_XA[group_P]).to(left_MA.dtype)
        right = (right_PB.float() / right_XB[group_P]).to(right_MB.dtype)
        return outer_each(left, right, padded_X)
    return torch._scaled_grouped_mm(
        left_PA.T.contiguous(),
        right_PB.T.contiguous().T,
        left_XA.reciprocal().flatten(),
        right_XB.reciprocal().flatten(),
        offs=ends_of(padded_X, left_MA.device),
        out_dtype=left_MA.dtype,
        use_fast_accum=True,
    )


FLOAT8 = Matmuls(float8_each, float8_outer)


def emulated(device: torch.device) -> bool:
    return device.type == "cpu"


def quantized(values: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(values times scale in e4m3, the scales (float32, size 1 along ``dim``))."""
    scale = _scale(values.abs().amax(dim, keepdim=True))
    return (values.float() * scale).to(DTYPE), scale


def rounded(values: Tensor, dim: int) -> Tensor:
    """To e4m3 and back; scales are powers of two, so bfloat16 holds the result exactly."""
    values8, scale = quantized(values, dim)
    return (values8.float() / scale).to(values.dtype)


def _scale(largest: Tensor) -> Tensor:
    """The largest power of two that keeps ``largest`` within e4m3."""
    ratio = LARGEST / largest.float().clamp(min=SMALLEST)
    return torch.ldexp(torch.ones_like(ratio), torch.frexp(ratio).exponent - 1)


def _by_group(values_PA: Tensor, group_P: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """(values in e4m3, the scale of each column in each group (X, A))."""
    largest_XA = torch.zeros(groups, values_PA.shape[1], device=values_PA.device)
    index_PA = group_P.unsqueeze(1).expand_as(values_PA)
    largest_XA.scatter_reduce_(0, index_PA, values_PA.abs().float(), "amax")
    scale_XA = _scale(largest_XA)
    return (values_PA.float() * scale_XA[group_P]).to(DTYPE), scale_XA


def _padding(rows_X: list[int], device: torch.device) -> tuple[Tensor, list[int]]:
    """(the padded position of each row, padded rows of each group: none is empty)."""
    padded_X = [max(ALIGNMENT, -(-rows // ALIGNMENT) * ALIGNMENT) for rows in rows_X]
    moved, shift_X = 0, []
    for rows, padded in zip(rows_X, padded_X):
        shift_X.append(moved)
        moved += padded - rows
    shift_M = torch.tensor(shift_X).repeat_interleave(torch.tensor(rows_X))
    return (torch.arange(sum(rows_X)) + shift_M).to(device), padded_X


def _padded(rows_MA: Tensor, row_M: Tensor, padded_X: list[int]) -> Tensor:
    padded_PA = rows_MA.new_zeros(sum(padded_X), rows_MA.shape[1])
    return padded_PA.index_copy_(0, row_M, rows_MA)
