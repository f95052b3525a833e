"""A start of the joint planner that levels every rank, wherever the tokens are.

With many domains no rank's slots can hold what all of them want; the level is then worth more than
the traffic, and relief lowers the traffic afterwards.
"""

from topoep_titan.planning.joint_ports import Problem, Slots, ports_without_replicas

NEAR_FIRST = 10  # a rank of the same domain goes first where it misses mean / NEAR_FIRST


def level(problem: Problem) -> Slots:
    """The fullest rank hands work of its largest main to the emptiest rank with a free slot, as
    much as brings either to the mean; ties to the lowest rank and expert. It ends when no rank is
    above the mean, none below it has a slot, or that rank hosts all that the fullest could give.
    """
    per_rank, slots = problem.slots_per_rank, Slots.empty(problem)
    load_R = ports_without_replicas(problem).load_R
    used_R = [0] * problem.ranks
    quota_E = list(problem.total_E)  # of the mains
    while True:
        full = max(range(problem.ranks), key=lambda r: (load_R[r], -r))
        host = _host(problem, load_R, used_R, problem.ranks_of(problem.domain_of(full)))
        if load_R[full] <= problem.mean or host is None:
            return slots
        first = host * per_rank
        hosted = slots.expert_N[first : first + used_R[host]]
        mains = [x for x in problem.mains_R[full] if x not in hosted and quota_E[x]]
        if not mains:
            return slots
        expert = max(mains, key=lambda x: (quota_E[x], -x))
        moved = min(quota_E[expert], load_R[full] - problem.mean, problem.mean - load_R[host])
        slots.expert_N[first + used_R[host]] = expert
        slots.quota_N[first + used_R[host]] = moved
        used_R[host] += 1
        quota_E[expert] -= moved
        load_R[full] -= moved
        load_R[host] += moved


def _host(problem: Problem, load_R: list[int], used_R: list[int], domain: range) -> int | None:
    """The emptiest rank below the mean with a free slot: of ``domain`` if that misses much."""
    hosts = [
        r
        for r in range(problem.ranks)
        if load_R[r] < problem.mean and used_R[r] < problem.slots_per_rank
    ]
    near = [
        r for r in hosts if r in domain and (problem.mean - load_R[r]) * NEAR_FIRST >= problem.mean
    ]
    return min(near or hosts, key=lambda r: (load_R[r], r), default=None)
