"""Standard routing workloads: seeded draws of expert ids, and the loads that planners take.

Letters: R ranks, T tokens of one rank, K top-k, E experts.
"""

import numpy as np
import torch
from torch import Tensor

from topoep_titan.errors import InputError
from topoep_titan.planning.coupled import check_draw, coupled, coupling_for
from topoep_titan.planning.plan import MAX_ASSIGNMENTS

MOST_LOGITS = 2**29  # of one rank, drawn at once
MOST_RANKS = 2**16
MOST_SKEW = 1000.0  # far above, float32 logits overflow


def skew(
    experts: int, top_k: int, ranks: int, tokens: int, *, router_skew: float, seed: int
) -> Tensor:
    """int16 (R, T, K): random logits plus one fixed bias an expert, as the paper's ``router_skew``.

    The bias is normal with standard deviation ``abs(router_skew)``, so 0 is uniform routing and -4
    the paper's most skewed one (section 6.4). Ids are ordered by falling logit.
    """
    _check(experts, top_k, ranks, tokens)
    if not abs(router_skew) <= MOST_SKEW:
        raise InputError(
            f"router skew is {router_skew:g}; give a number from -{MOST_SKEW:g} to {MOST_SKEW:g}, "
            "usually 0 to -4"
        )
    rng = np.random.default_rng(seed)
    bias_E = np.zeros(experts, dtype=np.float32)
    if router_skew:
        bias_E = rng.normal(0, abs(router_skew), experts).astype(np.float32)
    return _stack(
        _top_k(rng.standard_normal((tokens, experts), dtype=np.float32) + bias_E, top_k)
        for _ in range(ranks)
    )


def zipf(experts: int, top_k: int, ranks: int, tokens: int, *, seed: int) -> Tensor:
    """int16 (R, T, K): K experts without replacement, popularity 1/position, randomly permuted.

    Top-k of log-popularity plus Gumbel noise is a draw without replacement by popularity.
    """
    _check(experts, top_k, ranks, tokens)
    rng = np.random.default_rng(seed)
    log_popularity_E = -np.log(rng.permutation(experts) + 1.0)
    return _stack(
        _top_k(log_popularity_E + rng.gumbel(size=(tokens, experts)), top_k) for _ in range(ranks)
    )


def coupled_ids(experts: int, top_k: int, ranks: int, tokens: int, *, seed: int) -> Tensor:
    """int16 (R, T, K): one layer of the ``coupled`` workload, its documents dealt to the ranks."""
    _check(experts, top_k, ranks, tokens)
    ids_LTK = coupled(coupling_for(experts, top_k), layers=1, tokens=ranks * tokens, seed=seed)
    return ids_LTK.view(ranks, tokens, top_k)


def load_of(ids_RTK: Tensor, experts: int) -> Tensor:
    """int64 (R, E): assignments from each rank to each expert."""
    return torch.stack([torch.bincount(ids.flatten(), minlength=experts) for ids in ids_RTK.int()])


def _top_k(logits_TE: np.ndarray, top_k: int) -> np.ndarray:
    """int16 (T, K) by falling logit, the lower id on ties. A partition finds the K-th logit; only
    what is not below it is sorted."""
    negative_TE = -logits_TE
    least_T = np.partition(negative_TE, top_k - 1, axis=1)[:, top_k - 1]
    token, expert = np.nonzero(negative_TE <= least_T[:, None])
    order = np.lexsort((expert, negative_TE[token, expert], token))
    first_T = np.searchsorted(token, np.arange(len(least_T)))  # ties may leave more than K a token
    return expert[order][first_T[:, None] + np.arange(top_k)].astype(np.int16)


def _stack(ids_of_ranks) -> Tensor:
    return torch.from_numpy(np.stack(list(ids_of_ranks)))


def _check(experts: int, top_k: int, ranks: int, tokens: int) -> None:
    for name, value in (("ranks", ranks), ("tokens per rank", tokens), ("top-k", top_k)):
        if value < 1:
            raise InputError(f"{name} is {value}; give at least 1")
    if ranks * tokens * top_k > MAX_ASSIGNMENTS or tokens * experts > MOST_LOGITS:
        raise InputError(
            f"{tokens} tokens per rank are too many to draw; at most {MOST_LOGITS // experts} with "
            f"{experts} experts, and {MAX_ASSIGNMENTS} assignments in all"
        )
    if ranks > MOST_RANKS:
        raise InputError(f"ranks is {ranks}; a workload has at most {MOST_RANKS}")
    check_draw(1, ranks * tokens, experts)
    if not top_k <= experts <= 2**15:  # ids are int16, as in recorded traces
        raise InputError(
            f"{experts} experts with top-k {top_k}; give at least top-k and at most {2**15} experts"
        )
