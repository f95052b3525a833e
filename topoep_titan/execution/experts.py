"""Expert mathematics, forward and backward by hand: y = s * (silu(x w1^T) * (x w3^T)) w2^T.

Letters: M rows grouped by expert, X experts, D width, F expert width; s is the router's score of
each row. ``rows_X[i]`` rows belong to expert i, in order; experts without rows are allowed, and so
are no rows at all. One dtype for rows and weights: float32, bfloat16 or float64.

Scores are applied where the expert runs, on the narrow side of w2: the score's gradient is then
<a, g w2>, so that backward needs x, x w1^T and x w3^T alone and no output is kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Experts = Sequence[Tensor]  # w1 (X, F, D), w2 (X, D, F), w3 (X, F, D)


@dataclass(frozen=True)
class ForWgrad:
    """What Dgrad leaves for Wgrad; left^T right of each pair is one weight's gradient."""

    grad_h1_MF: Tensor
    grad_h3_MF: Tensor
    scaled_a_MF: Tensor


@dataclass(frozen=True)
class Matmuls:
    """The precision that experts multiply in."""

    each: Callable[[Tensor, Tensor, list[int]], Tensor]  # (M, A), (X, A, B) -> (M, B)
    outer: Callable[[Tensor, Tensor, list[int]], Tensor]  # (M, A), (M, B) -> (X, A, B)


def experts_forward(
    x_MD: Tensor, score_M: Tensor, rows_X: list[int], weights: Experts, matmuls: Matmuls
) -> tuple[Tensor, Tensor, Tensor]:
    """(y (M, D), h1 (M, F), h3 (M, F)); the last two are for backward."""
    w1_XFD, w2_XDF, w3_XFD = weights
    h1_MF = matmuls.each(x_MD, w1_XFD.transpose(1, 2), rows_X)
    h3_MF = matmuls.each(x_MD, w3_XFD.transpose(1, 2), rows_X)
    a_MF = _scaled(F.silu(h1_MF) * h3_MF, score_M)
    return matmuls.each(a_MF, w2_XDF.transpose(1, 2), rows_X), h1_MF, h3_MF


def experts_dgrad(
    grad_MD: Tensor,
    score_M: Tensor,
    h1_MF: Tensor,
    h3_MF: Tensor,
    rows_X: list[int],
    weights: Experts,
    matmuls: Matmuls,
) -> tuple[Tensor, Tensor, ForWgrad]:
    """(gradient of x (M, D), gradient of score (M,), what Wgrad needs)."""
    w1_XFD, w2_XDF, w3_XFD = weights
    unscaled_MF = matmuls.each(grad_MD, w2_XDF, rows_X)
    gate_MF = F.silu(h1_MF)
    a_MF = gate_MF * h3_MF
    grad_score_M = (unscaled_MF.to(score_M.dtype) * a_MF.to(score_M.dtype)).sum(1)
    grad_a_MF = _scaled(unscaled_MF, score_M)
    grad_h1_MF = torch.ops.aten.silu_backward(grad_a_MF * h3_MF, h1_MF)
    grad_h3_MF = grad_a_MF * gate_MF
    grad_x_MD = matmuls.each(grad_h1_MF, w1_XFD, rows_X)
    grad_x_MD += matmuls.each(grad_h3_MF, w3_XFD, rows_X)
    return grad_x_MD, grad_score_M, ForWgrad(grad_h1_MF, grad_h3_MF, _scaled(a_MF, score_M))


def experts_wgrad(
    x_MD: Tensor, grad_MD: Tensor, left: ForWgrad, rows_X: list[int], matmuls: Matmuls
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (w1, w2, w3); zeros for experts without rows."""
    return (
        matmuls.outer(left.grad_h1_MF, x_MD, rows_X),
        matmuls.outer(grad_MD, left.scaled_a_MF, rows_X),
        matmuls.outer(left.grad_h3_MF, x_MD, rows_X),
    )


def matmul_each(rows_MA: Tensor, weight_XAB: Tensor, rows_X: list[int]) -> Tensor:
    """(M, B): each group of rows times its expert's matrix."""
    if rows_MA.dtype == torch.float64:  # grouped matmuls have no float64
        groups = zip(rows_MA.split(rows_X), weight_XAB)
        return torch.cat([rows @ weight for rows, weight in groups])
    return torch._grouped_mm(rows_MA, weight_XAB, offs=ends_of(rows_X, rows_MA.device))


def outer_each(left_MA: Tensor, right_MB: Tensor, rows_X: list[int]) -> Tensor:
    """(X, A, B): left^T right of each group of rows."""
    if left_MA.dtype == torch.float64:
        groups = zip(left_MA.split(rows_X), right_MB.split(rows_X))
        return torch.stack([left.T @ right for left, right in groups])
    return torch._grouped_mm(left_MA.T, right_MB, offs=ends_of(rows_X, left_MA.device))


PLAIN = Matmuls(matmul_each, outer_each)


def ends_of(rows_X: list[int], device: torch.device) -> Tensor:
    return torch.tensor(rows_X).cumsum(0).to(torch.int32).to(device)


def _scaled(values_MF: Tensor, score_M: Tensor) -> Tensor:
    return (values_MF * score_M.unsqueeze(1)).to(values_MF.dtype)
