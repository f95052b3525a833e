"""Token shuffling: foretell the rank of a token's next experts, and deal tokens to ranks evenly.

Under TP + EP the reduce-scatter after attention hands every token to some rank of the TP group
anyway; sending it to the rank that holds its next experts makes their rows local (Expert Coupling,
section on moving tokens). The text names neither predictor nor assignment; ours are a ridge
regression on the expert sets of the last layers, and bidding in rounds.

Letters: T tokens, K top-k, E experts, R ranks, H layers of history, X = H*E + 1 features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from topoep_titan.errors import InputError

RIDGE = 10.0  # on tokens: far below the count of any expert in a sample of a thousand


@dataclass(frozen=True)
class Predictor:
    table_XR: Tensor  # float32: score of a rank by expert of the last layer, the one before, ...
    experts: int

    def scores(self, history: Sequence[Tensor]) -> Tensor:
        """float32 (T, R): expected assignments on each rank. ``history``: ids (T, K) of the last
        layer, the one before, ..., as many as the predictor was fitted on."""
        expected = (len(self.table_XR) - 1) // self.experts
        if len(history) != expected:
            raise InputError(f"{len(history)} layers of history; fitted on {expected}")
        ids_TX = torch.cat([ids.long() + h * self.experts for h, ids in enumerate(history)], dim=1)
        return self.table_XR[ids_TX].sum(1) + self.table_XR[-1]


def fit_predictor(
    history: Sequence[Tensor], next_TK: Tensor, main_E: Tensor, *, ranks: int
) -> Predictor:
    """Least squares with a ridge, in float64: one-hot history to assignments on each rank.

    ``history`` as in ``Predictor.scores``; ``next_TK``: the layer that is foretold, with experts
    placed by ``main_E``. One solve of an (H*E + 1) square system.
    """
    tokens, experts = len(next_TK), main_E.numel()
    x_TX = torch.zeros(tokens, len(history) * experts + 1, dtype=torch.float64)
    for h, ids_TK in enumerate(history):
        x_TX[:, h * experts : (h + 1) * experts].scatter_(1, ids_TK.long(), 1.0)
    x_TX[:, -1] = 1.0
    y_TR = torch.zeros(tokens, ranks, dtype=torch.float64)
    rank_TK = main_E.long()[next_TK.long()]
    y_TR.scatter_add_(1, rank_TK, torch.ones_like(rank_TK, dtype=torch.float64))
    gram_XX = x_TX.T @ x_TX + RIDGE * torch.eye(x_TX.shape[1], dtype=torch.float64)
    return Predictor(torch.linalg.solve(gram_XX, x_TX.T @ y_TR).float(), experts)


def assign_evenly(scores_TR: Tensor) -> Tensor:
    """int64 (T,): a rank for each token, exactly T/R tokens on each.

    In a round every open token bids for its best rank with room, by how much it would lose with
    the second best; a rank keeps its highest bids. At least one rank fills in a round that leaves
    anyone, so there are at most R. Ties: lowest rank, lowest token. Raises InputError when R does
    not divide T.
    """
    tokens, ranks = scores_TR.shape
    if tokens % ranks:
        raise InputError(f"{tokens} tokens do not divide evenly over {ranks} ranks")
    device = scores_TR.device
    rank_T = torch.full((tokens,), -1, dtype=torch.int64, device=device)
    room_R = torch.full((ranks,), tokens // ranks, dtype=torch.int64, device=device)
    open_N = torch.arange(tokens, device=device)
    while len(open_N):
        bids_NR = scores_TR[open_N].masked_fill(room_R == 0, -torch.inf)
        best_N = bids_NR.argmax(1)
        highest_N = bids_NR.gather(1, best_N[:, None]).squeeze(1)
        second_N = bids_NR.scatter(1, best_N[:, None], -torch.inf).amax(1)
        margin_N = (highest_N - second_N).nan_to_num()
        order_N = torch.argsort(margin_N, descending=True, stable=True)
        order_N = order_N[torch.argsort(best_N[order_N], stable=True)]  # by rank, then by margin
        bids_R = torch.bincount(best_N, minlength=ranks)
        place_N = torch.arange(len(open_N), device=device)
        place_N -= (bids_R.cumsum(0) - bids_R)[best_N[order_N]]
        kept_N = order_N[place_N < room_R[best_N[order_N]]]
        rank_T[open_N[kept_N]] = best_N[kept_N]
        room_R -= torch.bincount(best_N[kept_N], minlength=ranks)
        open_N = open_N[rank_T[open_N] < 0]
    return rank_T


def shuffled(scores_TR: Tensor, block: int) -> Tensor:
    """int64 (T,): ``assign_evenly`` within each ``block`` of tokens that one TP group holds."""
    return torch.cat([assign_evenly(scores) for scores in scores_TR.split(block)])
