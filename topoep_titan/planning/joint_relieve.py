"""Relieves the busiest port of each kind in turn: moves work of one expert to another instance, or
to a new one in a free slot, as long as the exact score falls.

Letters: R ranks, M domains, N replica slots.
"""

from dataclasses import dataclass, replace

from topoep_titan.planning.joint_ports import (
    Instance,
    Peaks,
    Ports,
    Problem,
    Slots,
    count_copy,
    find_peaks,
    instances_of,
    ports_of,
    score,
    serve_domain,
    store_outside,
)

KINDS = ("far", "load", "near", "copies")
WIDTH = 6  # experts that a turn looks at
GRAIN = 256  # those with mean / GRAIN assignments there and less are not
BAND = 64  # work within 1/BAND below a peak counts as excess


@dataclass(frozen=True)
class Move:
    expert: int
    source: Instance
    target: Instance
    amount: int


def relieve(problem: Problem, slots: Slots, rounds: int) -> Peaks:
    """Improve ``slots`` in place by at most ``rounds`` moves, until no kind has one.

    Returns the peaks that are left.
    """
    ports = ports_of(problem, slots)
    moves = idle = turn = 0
    while moves < rounds and idle < len(KINDS):
        move = _best_move(problem, slots, ports, KINDS[turn % len(KINDS)])
        turn += 1
        if move is None:
            idle += 1
            continue
        _commit(problem, slots, ports, move)
        moves += 1
        idle = 0
    return find_peaks(problem, ports, range(problem.ranks))


def _best_move(problem: Problem, slots: Slots, ports: Ports, kind: str) -> Move | None:
    """The move with the lowest (score, excess), first found on ties; None when none improves."""
    peaks = find_peaks(problem, ports, range(problem.ranks))
    best = score(problem, peaks), _excess(problem, ports, peaks)
    best_move = None
    for expert, rank in _experts_to_move(problem, slots, ports, kind):
        for move in _moves(problem, slots, ports, kind, peaks, expert, rank):
            trial = ports.copy()
            _apply(problem, trial, instances_of(problem, slots, expert), move)
            trial_peaks = find_peaks(problem, trial, range(problem.ranks))
            key = score(problem, trial_peaks), _excess(problem, trial, peaks)
            if key < best:
                best, best_move = key, move
    return best_move


def _excess(problem: Problem, ports: Ports, peaks: Peaks) -> int:
    """Priced work above a band under each peak: several ranks share a peak, and of equal scores the
    one with less excess is nearer to the next gain."""
    load, far, near = (peak - peak // BAND for peak in (peaks.load, peaks.far, peaks.near))
    costs, total = problem.costs, 0
    for r in range(problem.ranks):
        total += costs.assignment * max(0, ports.load_R[r] - load)
        for far_port in (ports.far_in_R[r], ports.far_out_R[r]):
            total += costs.token_far * max(0, far_port - far)
        for near_port in (ports.near_in(r), ports.near_out(problem, r)):
            total += costs.token_near * max(0, near_port - near)
    return total


def _experts_to_move(
    problem: Problem, slots: Slots, ports: Ports, kind: str
) -> list[tuple[int, int]]:
    """(expert, rank): the heaviest on the busiest rank; for its copy port the smallest replicas."""
    value_of = {
        "far": lambda r: ports.far_in_R[r],
        "load": lambda r: ports.load_R[r],
        "near": lambda r: max(ports.near_in(r), ports.near_out(problem, r)),
        "copies": lambda r: ports.copy_time(problem, r),
    }[kind]
    busiest = max(range(problem.ranks), key=lambda r: (value_of(r), -r))
    per_rank = problem.slots_per_rank
    if kind == "copies":
        users = [
            n
            for n, x in enumerate(slots.expert_N)
            if x >= 0 and busiest in (n // per_rank, problem.main_E[x])
        ]
        users.sort(key=lambda n: slots.quota_N[n])
        return [(slots.expert_N[n], n // per_rank) for n in users[:WIDTH]]
    replicas = slots.expert_N[busiest * per_rank : (busiest + 1) * per_rank]
    weights = {}
    for x in [*problem.mains_R[busiest], *(x for x in replicas if x >= 0)]:
        there = next(i for i in instances_of(problem, slots, x) if i.rank == busiest)
        own = min(problem.load_ER[x][busiest], there.quota)
        near = there.quota - there.outside - own
        weight = {"far": there.outside, "load": there.quota, "near": near}[kind]
        if weight > problem.mean // GRAIN:
            weights[x] = weight
    return [(x, busiest) for x in sorted(weights, key=lambda x: -weights[x])[:WIDTH]]


def _moves(
    problem: Problem, slots: Slots, ports: Ports, kind: str, peaks: Peaks, expert: int, rank: int
) -> list[Move]:
    """To every other instance; then in each domain to the least loaded rank with a free slot."""
    instances = instances_of(problem, slots, expert)
    source = next(i for i in instances if i.rank == rank)
    targets = [i for i in instances if i.rank != rank]
    hosts = {i.rank for i in instances}
    per_rank = problem.slots_per_rank
    for domain in range(problem.domains):
        free = [
            r
            for r in problem.ranks_of(domain)
            if r not in hosts and -1 in slots.expert_N[r * per_rank : (r + 1) * per_rank]
        ]
        if free:
            r = min(free, key=lambda r: (ports.load_R[r], r))
            targets.append(Instance(r, slots.expert_N.index(-1, r * per_rank), 0))
    moves = []
    for target in targets:
        amount = _amount(problem, ports, kind, peaks, source, target.rank)
        if amount > 0:
            moves.append(Move(expert, source, target, amount))
    return moves


def _amount(
    problem: Problem, ports: Ports, kind: str, peaks: Peaks, source: Instance, to: int
) -> int:
    """Half the gap of the port in question, without lifting the busiest load; copies move whole."""
    room = peaks.load - ports.load_R[to]
    if kind == "far":
        amount = min((ports.far_in_R[source.rank] - ports.far_in_R[to]) // 2, room)
    elif kind == "load":
        amount = (ports.load_R[source.rank] - ports.load_R[to]) // 2
    elif kind == "near":
        amount = min((ports.near_in(source.rank) - ports.near_in(to)) // 2, room)
    else:
        amount = source.quota
    return min(amount, source.quota)


def _apply(problem: Problem, ports: Ports, instances: list[Instance], move: Move) -> list[Instance]:
    """Serve the two domains of the move anew; returns the expert's instances after it."""
    domains = sorted({problem.domain_of(i.rank) for i in (move.source, move.target)})
    if problem.domain_of(move.source.rank) != domains[0]:
        domains.reverse()  # the source's first
    for domain in domains:
        serve_domain(problem, ports, move.expert, instances, domain, -1)
    after = [
        replace(i, quota=i.quota - move.amount) if i.rank == move.source.rank
        else replace(i, quota=i.quota + move.amount) if i.rank == move.target.rank
        else i
        for i in instances
    ]  # fmt: skip
    if all(i.rank != move.target.rank for i in instances):
        after.append(replace(move.target, quota=move.amount))
        after.sort(key=lambda instance: instance.rank)
        count_copy(problem, ports, move.expert, move.target.rank, +1)
    if move.source.slot >= 0 and move.source.quota == move.amount:
        count_copy(problem, ports, move.expert, move.source.rank, -1)
    for domain in domains:
        serve_domain(problem, ports, move.expert, after, domain, +1)
    return after


def _commit(problem: Problem, slots: Slots, ports: Ports, move: Move) -> None:
    after = _apply(problem, ports, instances_of(problem, slots, move.expert), move)
    for instance in after:
        if instance.slot >= 0:
            slots.expert_N[instance.slot] = move.expert if instance.quota else -1
            slots.quota_N[instance.slot] = instance.quota
    store_outside(slots, after)
