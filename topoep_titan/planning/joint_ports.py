"""Who serves whom under given replica slots, and what that costs at every port, exactly.

Letters: R ranks, M domains (nodes) of g ranks, E experts, S replica slots a rank, N = R*S replica
slots of the cluster (slot n is on rank n // S).

A source first uses the instance on its own rank, then instances of its own domain; only what its
domain cannot execute leaves it, in proportion over the domain's sources. What a domain executes
beyond its own demand comes from outside, to the instances whose ranks receive least so far.
"""

from dataclasses import dataclass

from torch import Tensor

from topoep_titan.cluster import Cluster
from topoep_titan.cluster.cost_model import UnitCosts


@dataclass(frozen=True)
class Problem:
    """The load, and everything about it that no candidate changes."""

    ranks: int
    domains: int
    ranks_per_domain: int
    slots_per_rank: int
    costs: UnitCosts
    balance_weight: int
    load_ER: list[list[int]]
    demand_EM: list[list[int]]
    total_E: list[int]
    main_E: list[int]
    home_E: list[int]  # domain of the main instance
    mains_R: list[list[int]]  # experts with their main on a rank, ascending
    sent_R: list[int]
    mean: int  # of the rank loads, rounded up

    def domain_of(self, rank: int) -> int:
        return rank // self.ranks_per_domain

    def ranks_of(self, domain: int) -> range:
        return range(domain * self.ranks_per_domain, (domain + 1) * self.ranks_per_domain)

    def outside_demand(self, expert: int) -> int:
        return self.total_E[expert] - self.demand_EM[expert][self.home_E[expert]]


def make_problem(
    load_RE: Tensor,
    main_E: Tensor,
    cluster: Cluster,
    costs: UnitCosts,
    replica_slots: int,
    balance_weight: int,
) -> Problem:
    ranks, experts = load_RE.shape
    load_ER = load_RE.T.tolist()
    mains = main_E.tolist()
    by_domain = load_RE.long().view(cluster.nodes, cluster.ranks_per_node, experts)
    return Problem(
        ranks=ranks,
        domains=cluster.nodes,
        ranks_per_domain=cluster.ranks_per_node,
        slots_per_rank=replica_slots,
        costs=costs,
        balance_weight=balance_weight,
        load_ER=load_ER,
        demand_EM=by_domain.sum(1).T.tolist(),
        total_E=[sum(column) for column in load_ER],
        main_E=mains,
        home_E=[rank // cluster.ranks_per_node for rank in mains],
        mains_R=[[x for x in range(experts) if mains[x] == rank] for rank in range(ranks)],
        sent_R=load_RE.long().sum(1).tolist(),
        mean=-(-int(load_RE.sum()) // ranks),
    )


@dataclass
class Slots:
    """Replica slots: a main executes what its replicas leave."""

    expert_N: list[int]  # -1 = empty
    quota_N: list[int]  # assignments executed here
    outside_N: list[int]  # of them from other domains

    @classmethod
    def empty(cls, problem: Problem) -> "Slots":
        count = problem.ranks * problem.slots_per_rank
        return cls([-1] * count, [0] * count, [0] * count)


@dataclass
class Instance:
    rank: int
    slot: int  # replica slot, -1 = the main
    quota: int
    own: int = 0  # of the quota: from its own rank
    outside: int = 0  # of the quota: from other domains


@dataclass
class Ports:
    """Assignments that a rank executes, receives from and sends to other domains, and serves for
    itself; copies that it receives and sends."""

    load_R: list[int]
    far_in_R: list[int]
    far_out_R: list[int]
    own_R: list[int]
    copies_R: list[list[int]]  # [far in, far out, near in, near out] of each rank

    def near_in(self, rank: int) -> int:
        return self.load_R[rank] - self.own_R[rank] - self.far_in_R[rank]

    def near_out(self, problem: Problem, rank: int) -> int:
        return problem.sent_R[rank] - self.own_R[rank] - self.far_out_R[rank]

    def copy_time(self, problem: Problem, rank: int) -> int:
        far_in, far_out, near_in, near_out = self.copies_R[rank]
        far, near = max(far_in, far_out), max(near_in, near_out)
        return problem.costs.copy_far * far + problem.costs.copy_near * near

    def copy(self) -> "Ports":
        copies_R = [list(copies) for copies in self.copies_R]
        rows = (self.load_R, self.far_in_R, self.far_out_R, self.own_R)
        return Ports(*map(list, rows), copies_R)


@dataclass(frozen=True)
class Peaks:
    """The busiest port of each kind: assignments, and picoseconds of copies."""

    load: int
    far: int
    near: int
    copies: int


def find_peaks(problem: Problem, ports: Ports, ranks: range) -> Peaks:
    return Peaks(
        load=max(ports.load_R[r] for r in ranks),
        far=max(max(ports.far_in_R[r], ports.far_out_R[r]) for r in ranks),
        near=max(max(ports.near_in(r), ports.near_out(problem, r)) for r in ranks),
        copies=max(ports.copy_time(problem, r) for r in ranks),
    )


def total_time(problem: Problem, peaks: Peaks) -> int:
    """The cost model in picoseconds, of a plan with replicas."""
    costs = problem.costs
    return (
        costs.assignment * peaks.load
        + costs.token_far * peaks.far
        + costs.token_near * peaks.near
        + peaks.copies
        + costs.plan
    )


def score(problem: Problem, peaks: Peaks) -> int:
    """The total and ``balance_weight`` per cent of its compute term: a taste for level ranks."""
    compute = problem.costs.assignment * peaks.load
    return total_time(problem, peaks) + compute // 100 * problem.balance_weight


def ports_without_replicas(problem: Problem) -> Ports:
    ranks = range(problem.ranks)
    load_R, far_in_R, own_R = ([0] * problem.ranks for _ in range(3))
    far_out_R = list(problem.sent_R)
    for expert, rank in enumerate(problem.main_E):
        load_R[rank] += problem.total_E[expert]
        far_in_R[rank] += problem.outside_demand(expert)
        own_R[rank] += problem.load_ER[expert][rank]
        for source in problem.ranks_of(problem.home_E[expert]):
            far_out_R[source] -= problem.load_ER[expert][source]
    return Ports(load_R, far_in_R, far_out_R, own_R, [[0, 0, 0, 0] for _ in ranks])


def ports_of(problem: Problem, slots: Slots) -> Ports:
    """The ports under ``slots``; sets ``slots.outside_N``. Experts in the order of their slots."""
    ports = ports_without_replicas(problem)
    for expert in dict.fromkeys(x for x in slots.expert_N if x >= 0):
        main = problem.main_E[expert]
        ports.load_R[main] -= problem.total_E[expert]
        ports.far_in_R[main] -= problem.outside_demand(expert)
        ports.own_R[main] -= problem.load_ER[expert][main]
        instances = instances_of(problem, slots, expert)
        for domain in domains_of(problem, instances):
            serve_domain(problem, ports, expert, instances, domain, +1)
        store_outside(slots, instances)
    for slot, expert in enumerate(slots.expert_N):
        if expert >= 0:
            count_copy(problem, ports, expert, slot // problem.slots_per_rank, +1)
    return ports


def instances_of(problem: Problem, slots: Slots, expert: int) -> list[Instance]:
    """By ascending rank, quotas and outside parts as stored; the main's are what is left."""
    replicas = [
        Instance(n // problem.slots_per_rank, n, slots.quota_N[n], outside=slots.outside_N[n])
        for n, hosted in enumerate(slots.expert_N)
        if hosted == expert
    ]
    home = problem.home_E[expert]
    at_home = [i for i in replicas if problem.domain_of(i.rank) == home]
    left = problem.total_E[expert] - sum(i.quota for i in replicas)
    executed = left + sum(i.quota for i in at_home)
    outside = max(0, executed - problem.demand_EM[expert][home]) - sum(i.outside for i in at_home)
    main = Instance(problem.main_E[expert], -1, left, outside=outside)
    return sorted([*replicas, main], key=lambda instance: instance.rank)


def domains_of(problem: Problem, instances: list[Instance]) -> list[int]:
    return sorted({problem.domain_of(i.rank) for i in instances})


def store_outside(slots: Slots, instances: list[Instance]) -> None:
    for instance in instances:
        if instance.slot >= 0:
            slots.outside_N[instance.slot] = instance.outside


def count_copy(problem: Problem, ports: Ports, expert: int, rank: int, sign: int) -> None:
    near = 2 if problem.home_E[expert] == problem.domain_of(rank) else 0
    ports.copies_R[rank][near] += sign
    ports.copies_R[problem.main_E[expert]][near + 1] += sign


def serve_domain(
    problem: Problem, ports: Ports, expert: int, instances: list[Instance], domain: int, sign: int
) -> dict[int, int]:
    """Add (sign +1) or take away (-1) what the expert's instances in ``domain`` do to the ports.

    Adding sets each instance's ``own`` and ``outside``, taking away reads ``outside``. Returns how
    much of each source's demand leaves the domain. A domain without instances sends everything
    home, which ``ports_without_replicas`` holds already.
    """
    here = [i for i in instances if problem.domain_of(i.rank) == domain]
    load_R = problem.load_ER[expert]
    if not here:
        return {source: load_R[source] for source in problem.ranks_of(domain)}
    for instance in here:
        instance.own = min(load_R[instance.rank], instance.quota)
        if sign > 0:
            instance.outside = 0
        ports.far_in_R[instance.rank] += sign * instance.outside
        ports.own_R[instance.rank] += sign * instance.own
        ports.load_R[instance.rank] += sign * instance.quota
    demand = problem.demand_EM[expert][domain]
    executed = sum(i.quota for i in here)
    own_of = {i.rank: i.own for i in here}
    rest = demand - sum(own_of.values())
    leaving = max(0, demand - executed)
    before = given = 0
    leaves = {}
    for source in problem.ranks_of(domain):
        before += load_R[source] - own_of.get(source, 0)
        upto = leaving * before // rest if leaving else 0  # in proportion, prefix rounding
        leaves[source] = upto - given
        given = upto
        was_home = load_R[source] if domain != problem.home_E[expert] else 0
        ports.far_out_R[source] += sign * (leaves[source] - was_home)
    if sign > 0:
        _pour_outside(ports, here, max(0, executed - demand))
    return leaves


def _pour_outside(ports: Ports, here: list[Instance], amount: int) -> None:
    """Always to the instance whose rank receives least so far, within its quota, whole levels at a
    time; the last few one by one in order."""
    while amount:
        open_ = [i for i in here if i.quota - i.own - i.outside > 0]
        low = min(ports.far_in_R[i.rank] for i in open_)
        lowest = [i for i in open_ if ports.far_in_R[i.rank] == low]
        stops = [low + i.quota - i.own - i.outside for i in lowest]
        stops += [ports.far_in_R[i.rank] for i in open_ if ports.far_in_R[i.rank] > low]
        step = min(min(stops) - low, max(amount // len(lowest), 1))
        for instance in lowest:
            moved = min(step, amount)
            instance.outside += moved
            ports.far_in_R[instance.rank] += moved
            amount -= moved
