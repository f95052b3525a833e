"""Calls the compiled placement solver: same signature and same result as ``reference.place``."""

import torch
from topoep_kernels import ops
from torch import Tensor

from topoep_titan.placement.sets import Effort, check_problem


def place(
    ids_TK: Tensor,
    *,
    experts: int,
    ranks: int,
    ranks_per_node: int,
    node_weight: int,
    balance_weight: int,
    load_E: Tensor | None = None,
    seed: int = 0,
    effort: Effort = Effort(),  # noqa: B008
) -> Tensor:
    """int64 (E,): the rank of each expert (``main_E``), exactly E/R experts on every rank.

    ``ids_TK``: expert sets of a sample of tokens. ``load_E``: assignments of each expert where a
    larger count than the sample's is known. ``node_weight``: rows that one distinct node of a token
    weighs against one distinct rank. ``balance_weight``: per cent of a row per token that a mean
    squared relative deviation of the ranks' loads of 1 costs. Deterministic by ``seed``. Raises
    InputError for malformed input, and KernelsMissing where the library is not built.
    """
    problem = check_problem(
        ids_TK, experts=experts, ranks=ranks, ranks_per_node=ranks_per_node, load_E=load_E,
        node_weight=node_weight, balance_weight=balance_weight,
    )  # fmt: skip
    rank_E = ops.place(
        torch.from_numpy(problem.sets_UK),
        torch.from_numpy(problem.weight_U),
        torch.from_numpy(problem.load_E),
        ranks=problem.ranks,
        nodes=problem.nodes,
        node_weight=node_weight,
        balance_weight=balance_weight,
        effort=(effort.starts, effort.moves, effort.kicks),
        seed=seed,
    )
    return rank_E.long()
