"""How good any plan could be: lower bounds on the modelled total, whatever the planner.

Two relaxations of "pinned mains, S replica slots, the closed-form cost", solved by scipy's HiGHS:

- ``relaxed_bound``, for every size: each NVLink domain stands for the average of its ranks.
- ``milp_bound``, for small groups: each rank for itself, placements integer, token counts not.

Both drop the planning constant, so a plan with a replica costs at least relaxation + constant and
one without is ``none``: the bound is the smaller of the two. It does not hold for planners that
move mains or exceed the slots.

Letters: R ranks, M domains of g ranks, E experts, S replica slots a rank.
"""

from dataclasses import dataclass

import numpy as np
import scipy.sparse
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from torch import Tensor

from topoep_titan.cluster import Cluster, ModelDims, modelled_time
from topoep_titan.cluster.cost_model import UnitCosts, unit_costs
from topoep_titan.errors import InputError
from topoep_titan.planning.plan import unbalanced_plan

MILP_RANKS, MILP_EXPERTS = 16, 64  # beyond this the search does not end in useful time
MILP_GAP = 0.005  # relative: a search that ends closer counts as closed
TOLERANCE = 1e-6  # relative: what HiGHS may violate; taken off the bound
MILLISECOND = 1e9  # in picoseconds: the solver's unit of time, near 1 for numerical comfort


@dataclass(frozen=True)
class MilpBound:
    total: int  # picoseconds: no plan takes less
    best: int | None  # picoseconds of the best plan found, token counts fractional; None: none yet
    closed: bool  # the search ended; otherwise the time limit did and the bound is weaker


def relaxed_bound(
    load_RE: Tensor, *, main_E: Tensor, cluster: Cluster, model_dims: ModelDims, replica_slots: int
) -> int:
    """Picoseconds that no plan can beat, by domain averages."""
    none, solvable = _none(load_RE, main_E, cluster, model_dims, replica_slots)
    if not solvable:
        return none
    costs = unit_costs(cluster, model_dims)
    load = load_RE.double().numpy() * load_RE.shape[0] / float(load_RE.sum())
    model = _domain_model(load, main_E.numpy(), cluster, costs, replica_slots, _unit(load_RE))
    result = model.solved()
    assert result.status == 0, result.message  # none is feasible, and the cost is not negative
    return _combined(none, result.fun, costs)


def milp_bound(
    load_RE: Tensor,
    *,
    main_E: Tensor,
    cluster: Cluster,
    model_dims: ModelDims,
    replica_slots: int,
    time_limit: float,
) -> MilpBound:
    """Search for ``time_limit`` seconds. Raises InputError above 16 ranks or 64 experts.

    Never weaker than the relaxed bound. A search that the limit ends is valid, but not repeatable
    to the last digit.
    """
    ranks, experts = load_RE.shape
    if ranks > MILP_RANKS or experts > MILP_EXPERTS:
        raise InputError(
            f"a MILP bound of {ranks} ranks and {experts} experts is out of reach; "
            f"at most {MILP_RANKS} and {MILP_EXPERTS}, use the relaxed bound"
        )
    none, solvable = _none(load_RE, main_E, cluster, model_dims, replica_slots)
    if not solvable:
        return MilpBound(none, best=none, closed=True)
    costs = unit_costs(cluster, model_dims)
    load = load_RE.double().numpy() * ranks / float(load_RE.sum())
    model = _rank_model(load, main_E.numpy(), cluster, costs, replica_slots, _unit(load_RE))
    result = model.solved(time_limit)
    total = _combined(none, result.mip_dual_bound or 0.0, costs)  # None: not even a relaxation yet
    relaxed = relaxed_bound(
        load_RE, main_E=main_E, cluster=cluster, model_dims=model_dims, replica_slots=replica_slots
    )
    best = None if result.x is None else min(none, int(result.fun * MILLISECOND) + costs.plan)
    return MilpBound(max(total, relaxed), best, closed=result.status == 0)


def _none(load_RE, main_E, cluster, model_dims, replica_slots) -> tuple[int, bool]:
    """The total of ``none``, and whether a replica could change anything."""
    plan = unbalanced_plan(load_RE, main_E, replica_slots)
    time = modelled_time(
        plan.expert_G, plan.assignments_RG, main_E=main_E, cluster=cluster, dims=model_dims
    )
    return time.total, bool(replica_slots and load_RE.shape[0] > 1 and load_RE.any())


def _unit(load_RE: Tensor) -> float:
    """Assignments in one unit of load: the mean rank load."""
    return float(load_RE.sum()) / load_RE.shape[0]


def _combined(none: int, milliseconds: float, costs: UnitCosts) -> int:
    relaxed = max(int(milliseconds * (1 - TOLERANCE) * MILLISECOND), 0)
    return min(none, relaxed + costs.plan)


class _Model:
    """A linear program in the making: blocks of variables, blocks of rows."""

    def __init__(self):
        self.columns: list[tuple[np.ndarray, ...]] = []  # lower, upper, cost, integer
        self.rows: list[tuple[np.ndarray, ...]] = []  # lower, upper
        self.entries: list[tuple[np.ndarray, ...]] = []  # row, column, value
        self.num_columns = self.num_rows = 0

    def variables(self, shape, *, lower=0.0, upper=np.inf, cost=0.0, integer=False) -> np.ndarray:
        """Indices of new variables in the given shape; bounds broadcast."""
        size = int(np.prod(shape))
        self.columns.append(
            tuple(np.broadcast_to(v, shape).reshape(size) for v in (lower, upper, cost, integer))
        )
        self.num_columns += size
        return np.arange(self.num_columns - size, self.num_columns).reshape(shape)

    def between(self, lower, upper, *terms: tuple) -> None:
        """One row for each first index: lower <= sum of value * variable <= upper.

        A term is (value, variables): variables (n, ...) are summed over all but the first axis.
        """
        n = max(len(variables) for _, variables in terms)
        rows = np.arange(self.num_rows, self.num_rows + n)
        for value, variables in terms:
            variables = np.broadcast_to(variables, (n, *np.shape(variables)[1:]))
            value = np.broadcast_to(value, variables.shape).ravel()
            row = np.broadcast_to(rows.reshape(n, *[1] * (variables.ndim - 1)), variables.shape)
            self.entries.append((row.ravel(), variables.ravel(), value))
        self.rows.append((np.broadcast_to(lower, n), np.broadcast_to(upper, n)))
        self.num_rows += n

    def at_least(self, variable: np.ndarray, *terms: tuple) -> None:
        """``variable`` (n,) or (1,) >= the sum of the terms in each row."""
        self.between(-np.inf, 0.0, *terms, (-1.0, variable))

    def solved(self, time_limit: float = np.inf) -> OptimizeResult:
        lower, upper, cost, integer = (np.concatenate(part) for part in zip(*self.columns))
        row, column, value = (np.concatenate(part) for part in zip(*self.entries))
        shape = self.num_rows, self.num_columns
        matrix = scipy.sparse.csc_array((value.astype(float), (row, column)), shape=shape)
        return milp(
            cost,
            integrality=integer,
            bounds=Bounds(lower, upper),
            constraints=LinearConstraint(
                matrix, *(np.concatenate(part) for part in zip(*self.rows))
            ),
            options={"time_limit": time_limit, "mip_rel_gap": MILP_GAP},
        )


def _objective(model: _Model, costs: UnitCosts, unit: float) -> tuple[np.ndarray, ...]:
    """(busiest rank's load, far port, near port, pull): the four priced maxima.

    Loads count in mean rank loads, so the first is at least 1; the pull is in milliseconds.
    """
    scale = unit / MILLISECOND
    return (
        model.variables(1, lower=1.0, cost=costs.assignment * scale),
        model.variables(1, cost=costs.token_far * scale),
        model.variables(1, cost=costs.token_near * scale),
        model.variables(1, cost=1.0),
    )


def _domain_model(
    load: np.ndarray, main: np.ndarray, cluster: Cluster, costs: UnitCosts, slots: int, unit: float
) -> _Model:
    """A maximum over ranks is at least the average over a domain: nothing below knows more."""
    size, domains, experts = cluster.ranks_per_node, cluster.nodes, load.shape[1]
    home = main // size
    demand = load.reshape(domains, size, experts).sum(1)  # D[d, x]
    model = _Model()
    busiest, far, near, pull = _objective(model, costs, unit)
    at_home = (home == np.arange(domains)[:, None]).astype(float)
    hosts = model.variables((domains, experts), lower=at_home, upper=1.0)
    share = model.variables((domains, experts, domains), upper=1.0)  # of D[d, x], executed in t
    amount = demand[:, :, None] / size  # assignments a rank, where share is 1
    model.between(1.0, 1.0, (1.0, share.reshape(-1, domains)))
    for d in range(domains):  # executed only where hosted
        model.between(-np.inf, 0.0, (1.0, share[d].ravel()), (-1.0, hosts.T.ravel()))
    for t in range(domains):
        others = np.arange(domains) != t
        model.at_least(busiest, (amount, share[:, :, t : t + 1][None]))
        model.at_least(far, (amount[others], share[others, :, t : t + 1][None]))  # received
        model.at_least(far, (amount[t], share[t][:, others][None]))  # sent
        # Demand that neither leaves the domain nor stays on its source goes near.
        stays = demand[t].sum() - _own_most(load, main, slots)[t * size : (t + 1) * size].sum()
        model.between(stays / size, np.inf, (1.0, near), (amount[t], share[t][:, others][None]))
        brought = hosts[t, home != t][None]
        model.between(-np.inf, slots * size, (1.0, brought))
        model.at_least(pull, (costs.copy_far / MILLISECOND / size, brought))  # received
    for rank in range(load.shape[0]):
        away = np.arange(domains) != rank // size
        sent = hosts[away][:, main == rank].reshape(1, -1)
        model.at_least(pull, (costs.copy_far / MILLISECOND, sent))
    return model


def _own_most(load: np.ndarray, main: np.ndarray, slots: int) -> np.ndarray:
    """(R,) the most that each rank can execute for itself: its mains and its S best others."""
    is_main = main == np.arange(load.shape[0])[:, None]
    others = np.sort(np.where(is_main, 0.0, load), axis=1)[:, ::-1]
    return np.where(is_main, load, 0.0).sum(1) + others[:, :slots].sum(1)


def _rank_model(
    load: np.ndarray, main: np.ndarray, cluster: Cluster, costs: UnitCosts, slots: int, unit: float
) -> _Model:
    """Exact but for fractional token counts. Blocks are indexed [rank, expert]."""
    ranks, experts = load.shape
    node = np.arange(ranks) // cluster.ranks_per_node
    in_node = np.stack([load[node == d].sum(0) for d in node])
    is_main = main == np.arange(ranks)[:, None]
    model = _Model()
    busiest, far, near, pull = _objective(model, costs, unit)
    hosts = model.variables(load.shape, lower=is_main, upper=1.0, integer=True)
    model.between(-np.inf, experts // ranks + slots, (1.0, hosts))

    # What a rank sends to itself, near and far, and what it receives; received only where hosted.
    own, near_in, near_out, far_in, far_out = (model.variables(load.shape) for _ in range(5))
    model.between(load.ravel(), load.ravel(), *((1.0, b.ravel()) for b in (own, near_out, far_out)))
    limits = (load, in_node - load, load.sum(0) - in_node)
    for block, limit in zip((own, near_in, far_in), limits):
        model.between(-np.inf, 0.0, (1.0, block.ravel()), (-limit.ravel(), hosts.ravel()))
    model.between(0.0, 0.0, (1.0, far_in.T), (-1.0, far_out.T))
    for here in (node == d for d in range(cluster.nodes)):
        model.between(0.0, 0.0, (1.0, near_in[here].T), (-1.0, near_out[here].T))
        model.between(-np.inf, 0.0, (1.0, far_in[here].T), (-1.0, far_out[~here].T))
    for rank in range(ranks):
        peers = (node == node[rank]) & (np.arange(ranks) != rank)
        model.between(-np.inf, 0.0, (1.0, near_in[rank]), (-1.0, near_out[peers].T))

    model.at_least(busiest, (1.0, own), (1.0, near_in), (1.0, far_in))
    for port, block in ((near, near_in), (near, near_out), (far, far_in), (far, far_out)):
        model.at_least(port, (1.0, block))
    far_copies, near_copies = model.variables(ranks), model.variables(ranks)
    for rank in range(ranks):
        is_far, is_here = node != node[rank], np.arange(ranks) == rank
        received, sent = hosts[rank][None], hosts[:, main == rank]
        model.at_least(far_copies[[rank]], (1.0, received[:, is_far[main]]))
        model.at_least(far_copies[[rank]], (1.0, sent[is_far].reshape(1, -1)))
        model.at_least(near_copies[[rank]], (1.0, received[:, ~is_far[main] & ~is_here[main]]))
        model.at_least(near_copies[[rank]], (1.0, sent[~is_far & ~is_here].reshape(1, -1)))
    far_ms, near_ms = costs.copy_far / MILLISECOND, costs.copy_near / MILLISECOND
    model.at_least(pull, (far_ms, far_copies), (near_ms, near_copies))
    return model
