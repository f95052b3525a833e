"""The placement solver as a readable specification; the compiled one agrees with it bit for bit.

Experts are vertices, a token's experts a hyperedge, ranks blocks of exactly E/R. A deduplicating
dispatcher sends one row per distinct rank, and one per distinct node across nodes, hence

    cost = sum over tokens of (distinct ranks + node_weight * distinct nodes)
           + balance_weight per cent of T * mean over ranks of (load / mean load - 1)^2

in integers. Nodes first, then the ranks inside each node, then both together. The Expert Coupling
text partitions the graph of pairs (section on correlated placement); pairs only start the search
here, since for top-k above 2 they overcount tokens that several experts already share.

Letters: E experts, U distinct sets, H groups (ranks or nodes).
"""

import numpy as np
import torch
from torch import Tensor

from topoep_titan.placement.sets import MEAN_LOAD, UNIT, Effort, Problem, check_problem

HEAT = 2  # first threshold of annealing, in mean pair weights of an expert with one group
KICK = 3  # random swaps of one disturbance
MASK = 2**64 - 1


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
    """int64 (E,): the rank of each expert, E/R on every rank; see ``placement.place``."""
    problem = check_problem(
        ids_TK, experts=experts, ranks=ranks, ranks_per_node=ranks_per_node, load_E=load_E,
        node_weight=node_weight, balance_weight=balance_weight,
    )  # fmt: skip
    chosen_UE = np.zeros((len(problem.sets_UK), experts), dtype=np.int64)
    np.put_along_axis(chosen_UE, problem.sets_UK.astype(np.int64), 1, axis=1)
    rank_E = _place(_Sets(chosen_UE, problem.weight_U.astype(np.int64)), problem, effort, seed)
    return torch.from_numpy(rank_E)


class _Sets:
    def __init__(self, chosen_UE: np.ndarray, weight_U: np.ndarray, tokens: int | None = None):
        self.chosen_UE, self.weight_U = chosen_UE, weight_U
        self.tokens = int(weight_U.sum()) if tokens is None else tokens
        self.experts = chosen_UE.shape[1]

    def inside(self, members: np.ndarray) -> "_Sets":
        """As seen by some experts; sets with fewer than two of them say nothing."""
        chosen = self.chosen_UE[:, members]
        kept = chosen.sum(1) > 1
        return _Sets(chosen[kept], self.weight_U[kept], self.tokens)


def _place(sets: _Sets, problem: Problem, effort: Effort, seed: int) -> np.ndarray:
    random, load_E = _Random(seed), problem.load_E
    ranks, nodes = problem.ranks, problem.nodes
    balance = problem.balance_weight
    if nodes == 1:
        return _place_flat(sets, load_E, ranks, balance, effort, random)
    node_E = _place_flat(sets, load_E, nodes, balance, effort, random)
    per_node = ranks // nodes
    rank_E = np.empty(sets.experts, dtype=np.int64)
    for node in range(nodes):
        members = np.flatnonzero(node_E == node)
        inside = _place_flat(
            sets.inside(members), load_E[members], per_node, balance, effort, random
        )
        rank_E[members] = node * per_node + inside
    swaps = _Swaps(sets, load_E, ranks, nodes, problem.node_weight, balance)
    return _polish(swaps, rank_E, effort.kicks, random)


def _place_flat(
    sets: _Sets, load_E: np.ndarray, groups: int, balance: int, effort: Effort, random: "_Random"
) -> np.ndarray:
    if groups == 1:
        return np.zeros(sets.experts, dtype=np.int64)
    pair_EE = (sets.chosen_UE * sets.weight_U[:, None]).T @ sets.chosen_UE
    np.fill_diagonal(pair_EE, 0)
    swaps = _Swaps(sets, load_E, groups, 1, 0, balance)
    best_E, cost = None, 0
    for start in range(effort.starts + 1):
        group_E = _shuffled(sets.experts, groups, random) if start else _greedy(pair_EE, groups)
        if start % 2:
            _anneal(pair_EE, group_E, groups, effort.moves, random)
        group_E = swaps.descend(_descend_pairs(pair_EE, group_E, groups))
        if best_E is None or swaps.cost(group_E) < cost:
            best_E, cost = group_E, swaps.cost(group_E)
    return _polish(swaps, best_E, effort.kicks, random)


def _polish(swaps: "_Swaps", rank_E: np.ndarray, kicks: int, random: "_Random") -> np.ndarray:
    """Disturb by a few random swaps and descend; keep what is cheaper, else go back."""
    best_E = swaps.descend(rank_E)
    for _ in range(kicks):
        kicked_E = best_E.copy()
        for _ in range(KICK):
            a, b = random.below(len(best_E)), random.below(len(best_E))
            kicked_E[[a, b]] = kicked_E[[b, a]]
        kicked_E = swaps.descend(kicked_E)
        if swaps.cost(kicked_E) < swaps.cost(best_E):
            best_E = kicked_E
    return best_E


class _Swaps:
    """The exact cost, and its exact change for every swap of two experts."""

    def __init__(
        self, sets: _Sets, load_E: np.ndarray, ranks: int, nodes: int, node_weight: int,
        balance: int,
    ):  # fmt: skip
        self.sets, self.ranks = sets, ranks
        total = max(1, int(load_E.sum()))
        self.load_E = (2 * load_E * MEAN_LOAD * ranks + total) // (2 * total)
        self.load_weight = balance * sets.tokens // (100 * ranks)
        self.levels = [(UNIT, 1, ranks)]  # cost of a distinct group, ranks in it, groups
        if nodes > 1:
            self.levels.append((node_weight * UNIT, ranks // nodes, nodes))

    def cost(self, rank_E: np.ndarray) -> int:
        load_R = np.bincount(rank_E, self.load_E, self.ranks).astype(np.int64)
        cost = self.load_weight * int((load_R**2).sum())
        for unit, ranks, groups in self.levels:
            present_UH = self._count(rank_E // ranks, groups) > 0
            cost += unit * int(self.sets.weight_U @ present_UH.sum(1))
        return cost

    def descend(self, rank_E: np.ndarray) -> np.ndarray:
        """The best swap until none helps; ties go to the lowest pair."""
        rank_E = rank_E.copy()
        while True:
            change_EE = np.where(_candidates(rank_E), self.change(rank_E), 0)
            a, b = np.unravel_index(change_EE.argmin(), change_EE.shape)
            if change_EE[a, b] >= 0:
                return rank_E
            rank_E[[a, b]] = rank_E[[b, a]]

    def change(self, rank_E: np.ndarray) -> np.ndarray:
        """int64 (E, E): change of the cost when experts a and b of different ranks swap.

        Leaving frees the tokens that have nobody else on the group; entering costs those that have
        nobody there yet. A token that holds both visits the same groups as before, and is taken
        back out of what the two leave.
        """
        load_R = np.bincount(rank_E, self.load_E, self.ranks).astype(np.int64)
        more_EE = self.load_E[:, None] - self.load_E
        gap_EE = load_R[rank_E] - load_R[rank_E][:, None]
        change_EE = self.load_weight * 2 * more_EE * (more_EE + gap_EE)
        chosen_UE, weight_U = self.sets.chosen_UE, self.sets.weight_U[:, None]
        for unit, ranks, groups in self.levels:
            group_E = rank_E // ranks
            count_UH = self._count(group_E, groups)
            alone_UE = weight_U * (chosen_UE * (count_UH[:, group_E] == 1))
            freed_E, both_EE = alone_UE.sum(0), alone_UE.T @ chosen_UE
            paid_HE = (weight_U * (count_UH == 0)).T @ chosen_UE
            paid_EE = paid_HE[group_E].T  # [a, b]: a enters b's group
            swap_EE = paid_EE + paid_EE.T + both_EE + both_EE.T - freed_E[:, None] - freed_E
            change_EE += unit * np.where(group_E[:, None] == group_E, 0, swap_EE)
        return change_EE

    def _count(self, group_E: np.ndarray, groups: int) -> np.ndarray:
        """int64 (U, H): experts of each set in each group."""
        return self.sets.chosen_UE @ (group_E[:, None] == np.arange(groups)).astype(np.int64)


def _greedy(pair_EE: np.ndarray, groups: int) -> np.ndarray:
    """Groups grown one by one: the free expert with most company, then those chosen with it."""
    experts = len(pair_EE)
    group_E = np.full(experts, -1)
    for group in range(groups):
        gain_E = pair_EE[:, group_E < 0].sum(1)
        for n in range(experts // groups):
            best = int(np.where(group_E < 0, gain_E, -1).argmax())
            group_E[best] = group
            gain_E = pair_EE[best] + (gain_E if n else 0)
    return group_E


def _shuffled(experts: int, groups: int, random: "_Random") -> np.ndarray:
    group_E = np.arange(experts) // (experts // groups)
    for e in range(experts - 1, 0, -1):
        other = random.below(e + 1)
        group_E[[e, other]] = group_E[[other, e]]
    return group_E


def _anneal(
    pair_EE: np.ndarray, group_E: np.ndarray, groups: int, moves: int, random: "_Random"
) -> None:
    """Threshold accepting, in place: swaps that lose at most a bound, which falls to zero."""
    experts = len(pair_EE)
    highest = HEAT * int(pair_EE.sum()) // (experts * groups)
    for move in range(moves):
        a, b = random.below(experts), random.below(experts)
        if group_E[a] == group_E[b]:
            continue
        threshold = highest * (moves - move) // moves
        if _pair_gain(pair_EE, group_E, groups)[a, b] >= -threshold:
            group_E[[a, b]] = group_E[[b, a]]


def _descend_pairs(pair_EE: np.ndarray, group_E: np.ndarray, groups: int) -> np.ndarray:
    group_E = group_E.copy()
    while True:
        gain_EE = np.where(_candidates(group_E), _pair_gain(pair_EE, group_E, groups), 0)
        a, b = np.unravel_index(gain_EE.argmax(), gain_EE.shape)
        if gain_EE[a, b] <= 0:
            return group_E
        group_E[[a, b]] = group_E[[b, a]]


def _pair_gain(pair_EE: np.ndarray, group_E: np.ndarray, groups: int) -> np.ndarray:
    """(E, E): what swapping two experts adds to the pairs that share a group."""
    company_EH = pair_EE @ (group_E[:, None] == np.arange(groups)).astype(np.int64)
    own_E = company_EH[np.arange(len(group_E)), group_E]
    enters_EE = company_EH[:, group_E]  # [a, b]: a's company in b's group
    return enters_EE + enters_EE.T - own_E[:, None] - own_E - 2 * pair_EE


def _candidates(group_E: np.ndarray) -> np.ndarray:
    return np.triu(group_E[:, None] != group_E)


class _Random:
    """splitmix64."""

    def __init__(self, seed: int):
        self.state = seed & MASK

    def below(self, n: int) -> int:
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
        z ^= z >> 31
        return (z >> 32) * n >> 32
