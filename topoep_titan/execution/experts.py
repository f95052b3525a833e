"""Expert mathematics: y = (silu(x w1^T) * (x w3^T)) w2^T for rows grouped by expert.

Letters: M rows, X experts, D width, F expert width. One seam with two bodies: grouped matmuls in
fp32 or bf16, and a loop over experts in float64, which grouped matmuls do not have.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def expert_ffn(
    x_MD: Tensor, rows_X: list[int], w1_XFD: Tensor, w2_XDF: Tensor, w3_XFD: Tensor
) -> Tensor:
    """(M, D) rows, ``rows_X[i]`` of them for expert i in order, through their experts.

    Rows and weights share one dtype: float32, bfloat16 or float64. Experts without rows are
    allowed, and so are no rows at all; gradients (zeros) still reach every weight.
    """
    if x_MD.dtype == torch.float64:
        parts = [
            (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T
            for x, w1, w2, w3 in zip(x_MD.split(rows_X), w1_XFD, w2_XDF, w3_XFD)
        ]
        return torch.cat(parts)
    ends_X = torch.tensor(rows_X).cumsum(0).to(torch.int32).to(x_MD.device)

    def grouped(rows: Tensor, weight: Tensor) -> Tensor:
        return torch._grouped_mm(rows, weight.transpose(-2, -1), offs=ends_X)

    return grouped(F.silu(grouped(x_MD, w1_XFD)) * grouped(x_MD, w3_XFD), w2_XDF)
