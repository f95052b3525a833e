"""The oracle: the routed experts of all ranks in one process, expert by expert, no plan at all."""

import torch
import torch.nn.functional as F
from torch import Tensor


def reference_layer(
    x_TD: Tensor,
    scores_TK: Tensor,
    ids_TK: Tensor,
    w1_EFD: Tensor,
    w2_EDF: Tensor,
    w3_EFD: Tensor,
) -> Tensor:
    """(T, D): every token through its K experts, weighted by its scores.

    T may hold the tokens of all ranks one after the other. Run it in float64; it is differentiable
    in x, scores and weights.
    """
    out_TD = torch.zeros_like(x_TD)
    for expert in range(w1_EFD.shape[0]):
        token, k = (ids_TK == expert).nonzero(as_tuple=True)
        x = x_TD[token]
        y = (F.silu(x @ w1_EFD[expert].T) * (x @ w3_EFD[expert].T)) @ w2_EDF[expert].T
        out_TD = out_TD.index_add(0, token, y * scores_TK[token, k].unsqueeze(-1))
    return out_TD
