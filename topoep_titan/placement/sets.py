"""What every placement solver works on: distinct expert sets, their tokens, and the loads.

Letters: T tokens, K top-k, E experts, U distinct sets, R ranks, M nodes.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from topoep_titan.errors import InputError

# Per cent of a row per token that a mean squared relative deviation of the ranks' loads of 1 costs.
# On drawn routing 50 to 200 remove the same rows, and 200 spreads hot experts.
BALANCE_WEIGHT = 200
UNIT = 1 << 24  # cost of one row; the load term is in the same unit
MEAN_LOAD = 1 << 12  # loads are scaled so that a group's mean is this
MOST_ASSIGNMENTS = 2**30  # of one sample: the solver's tables are int32


@dataclass(frozen=True)
class Effort:
    """How long the solver searches. The default stays below 3 s a layer up to 256 experts."""

    starts: int = 16  # random starting points beside the greedy one; every second is annealed
    moves: int = 1_000_000  # random swaps of one annealing
    kicks: int = 200  # disturbances of the best placement, each followed by a descent


@dataclass(frozen=True)
class Problem:
    sets_UK: np.ndarray  # int32, ascending ids in a row, rows in lexicographic order
    weight_U: np.ndarray  # int32: tokens that chose exactly this set
    load_E: np.ndarray  # int64
    ranks: int
    nodes: int
    node_weight: int
    balance_weight: int


def check_problem(
    ids_TK: Tensor,
    *,
    experts: int,
    ranks: int,
    ranks_per_node: int,
    load_E: Tensor | None,
    node_weight: int,
    balance_weight: int,
) -> Problem:
    """Raise InputError for anything a solver must not see; otherwise the compressed problem."""
    check_ids(ids_TK, experts)
    if ranks < 1 or experts % ranks:
        raise InputError(
            f"{experts} experts are not a multiple of {ranks} ranks; every rank holds the same "
            "number of experts"
        )
    if ranks_per_node < 1 or ranks % ranks_per_node:
        raise InputError(f"{ranks} ranks do not fill nodes of {ranks_per_node}")
    for name, value, most in (
        ("node_weight", node_weight, 1000),
        ("balance_weight", balance_weight, 10_000),
    ):
        if not 0 <= value <= most:
            raise InputError(f"{name} is {value}; give an integer from 0 to {most}")
    if ids_TK.numel() >= MOST_ASSIGNMENTS:
        raise InputError(
            f"a sample of {ids_TK.numel()} assignments; the solver takes fewer than "
            f"{MOST_ASSIGNMENTS}, and a few thousand tokens suffice"
        )
    ids = np.sort(ids_TK.numpy().astype(np.int32), axis=1)
    sets_UK, weight_U = np.unique(ids, axis=0, return_counts=True)
    if (sets_UK[:, 1:] == sets_UK[:, :-1]).any():
        token = int((ids[:, 1:] == ids[:, :-1]).any(1).argmax())
        raise InputError(f"token {token} chose an expert twice: {ids_TK[token].tolist()}")
    load = np.bincount(ids.ravel(), minlength=experts)
    if load_E is not None:
        if load_E.shape != (experts,) or int(load_E.min()) < 0:
            raise InputError(
                f"load must be {experts} non-negative counts, got shape {tuple(load_E.shape)}"
            )
        load = load_E.numpy()
    load = load.astype(np.int64)
    shrink = -(-int(load.sum()) // (2**31 - 1))  # the solver squares loads: keep the total int32
    return Problem(
        np.ascontiguousarray(sets_UK), weight_U.astype(np.int32), load // max(1, shrink),
        ranks, ranks // ranks_per_node, node_weight, balance_weight,
    )  # fmt: skip


def check_ids(ids_TK: Tensor, experts: int) -> None:
    """Raise InputError unless ``ids_TK`` are integers (T, K) of at least one token, in [0, E)."""
    if ids_TK.ndim != 2 or ids_TK.is_floating_point() or not ids_TK.numel():
        raise InputError(
            f"expert ids must be integers (tokens, top-k) of at least one token, got "
            f"{str(ids_TK.dtype).removeprefix('torch.')} {tuple(ids_TK.shape)}"
        )
    lowest, highest = int(ids_TK.min()), int(ids_TK.max())
    if lowest < 0 or highest >= experts or ids_TK.shape[1] > experts:
        raise InputError(
            f"expert ids go from {lowest} to {highest} with top-k {ids_TK.shape[1]}; there are "
            f"{experts} experts"
        )
