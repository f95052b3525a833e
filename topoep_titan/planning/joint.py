"""The joint planner: replicas and token split in one plan, under the port cost model.

Every term of the cost model is a maximum over ranks, so what stays below a maximum is free and
what lifts it is paid in full. The planner therefore builds whole candidates for a few sets of
targets, takes the most promising one, and then relieves its busiest ports under the exact price.
Integers only; every choice has a total order. This page and the files named below are the
specification; `kernels/csrc/planner/joint*.h` computes the same plans, bit for bit.

Letters: R ranks, M domains (nodes) of g ranks, E experts, S replica slots a rank, D[d,x]
assignments of domain d's sources to expert x, home(x) the domain of x's main, mean =
ceil(assignments / R).

1. Serving (joint_ports). Replica slots carry quotas; a main executes what its replicas leave. A
   source uses the instance on its own rank up to its quota, then its domain's instances. What
   domain d cannot execute, D[d,x] - A[d,x] > 0 with A[d,x] the quotas there, leaves it: each
   source gives in proportion to what its own rank did not take (prefix rounding down). What a
   domain executes beyond D[d,x] comes from outside, poured into the domain's instances: always to
   the rank with the least far in-port, up to its quota less its own part, equals raised together.
   Experts are served in the order of their lowest slot. Price: the cost model of
   `cluster.cost_model`, exactly. Score: price + (compute // 100) * balance_weight.
2. Pairs (joint_build). (d, x) with d != home(x) and D[d,x] at least half the price of a far copy
   in far assignments, by (D desc, x, d), the first 4*R*S.
3. Candidate of a recipe (joint_build). *Select*: most_out = max(1, ceil(copies*(M-1)/3)) copies
   may leave a main rank, g*S*share//8 enter a domain. In pair order take (d, x) while the main's
   far in-port is above select_far % of the mean; then, again from the first, while the far
   out-ports of d are above g times that; both sink by D[d,x] with each pair. *Bring*: d executes
   D[d,x], home the rest. *Shift*, at most 2*M times: the fullest domain hands work to the emptiest
   (lowest on ties) until one reaches g*mean, spread over all experts that both host in proportion
   to what the fullest executes (prefix rounding down); it ends when both still miss the level.
   Level = max(mean, ceil of a domain's load over g). *Fill* each domain: brought experts by
   (amount desc, x) go whole to the emptiest rank (`whole`), or wait. Each rank sheds pieces of its
   mains: what is above the level, from the smallest main that covers it or else the largest; and
   outside work above fill_far % of the mean, from the main with most of it, whichever excess is
   larger (load on ties). Items by (size desc, x) are placed on the rank with the smallest room
   below the level that takes them, else with the largest, and cut there while slots last; one free
   slot is reserved for each waiting expert, and at most min(most_out, S) far copies arrive on a
   rank. What finds no room stays on its main; a brought expert that finds no slot makes the
   candidate void.
4. Starts. The candidates of the table's rows, then the replicas of `topoep` with the quotas that it
   gives them, then empty slots, then levelled ranks (joint_level). Each is priced; its promise is
   its score with each peak of load, far and near port, domain by domain, halfway down to the mean
   over the domain's ranks, for relief levels peaks; of the levelled start, whose load cannot fall
   further, LEVEL_DOUBT per cent more. The RELIEVED // R**2 starts (at least one) with the lowest
   promise go on, first ones on ties: a small group can afford to look at all of them.
5. Relief (joint_relieve) of each. In turn for the far in-port, the load, the near port and the copy
   port: the WIDTH heaviest experts of the busiest rank (for copies: the smallest replicas that use
   its port) try each other instance, and in each domain the least loaded rank with a free slot,
   moving half the gap of that port (copies: the whole quota) without lifting the busiest load. Only
   the two domains involved are served anew. The move with the lowest score is made, ties by the
   priced work near the peaks; at most `rounds` moves, until no kind has one. The start that ends
   with the lowest score wins, the most promising on ties.
6. The plan without replicas is returned when it is not slower (planning and transfer charged).

The rows of the table were chosen by forward selection on skewed and Zipf loads of 8 to 128 ranks,
seeds 10 to 12, the last one for small groups; ROUNDS, RELIEVED, LEVEL_DOUBT, NEAR_FIRST, WIDTH,
GRAIN and BAND while looking at seeds 0 to 4 and 20 to 22.
"""

from itertools import accumulate

from torch import Tensor

from topoep_titan.cluster import Cluster, ModelDims
from topoep_titan.cluster.cost_model import UnitCosts, unit_costs
from topoep_titan.planning.joint_build import Recipe, build, list_pairs
from topoep_titan.planning.joint_level import level
from topoep_titan.planning.joint_ports import (
    Instance,
    Peaks,
    Ports,
    Problem,
    Slots,
    find_peaks,
    instances_of,
    make_problem,
    ports_of,
    ports_without_replicas,
    score,
    serve_domain,
    total_time,
)
from topoep_titan.planning.joint_relieve import relieve
from topoep_titan.planning.plan import Plan, main_slots, unbalanced_plan
from topoep_titan.planning.topoep import topoep

TABLE = (
    Recipe(copies=4, share=7, whole=0, select_far=20, fill_far=0),
    Recipe(copies=1, share=4, whole=1, select_far=5, fill_far=50),
    Recipe(copies=12, share=7, whole=0, select_far=10, fill_far=0),
    Recipe(copies=2, share=5, whole=0, select_far=55, fill_far=70),
    Recipe(copies=5, share=8, whole=1, select_far=30, fill_far=10),
    Recipe(copies=7, share=6, whole=0, select_far=5, fill_far=50),
    Recipe(copies=12, share=8, whole=1, select_far=0, fill_far=0),
)
BALANCE_WEIGHT = 60
ROUNDS = 240
LEVEL_DOUBT = 10  # per cent
RELIEVED = 768  # starts that are relieved, times ranks squared: a start costs about that


def joint(
    load_RE: Tensor,
    *,
    main_E: Tensor,
    cluster: Cluster,
    model_dims: ModelDims,
    replica_slots: int,
    balance_weight: int = BALANCE_WEIGHT,
    rows: int = len(TABLE),
    rounds: int = ROUNDS,
    costs: UnitCosts | None = None,
) -> Plan:
    """The best start, relieved by at most ``rounds`` moves, of the first ``rows`` of ``TABLE``,
    ``topoep``, empty slots and levelled ranks; the plan without replicas when that is not slower.

    ``balance_weight``: per cent of the compute term that a score adds. ``costs``: other prices than
    those of the cluster. ``load_RE`` and ``main_E`` are trusted; validate what a user gave with
    ``plan.check_load`` first.
    """
    costs = costs or unit_costs(cluster, model_dims)
    problem = make_problem(load_RE, main_E, cluster, costs, replica_slots, balance_weight)
    published = topoep(
        load_RE,
        main_E=main_E,
        cluster=cluster,
        model_dims=model_dims,
        replica_slots=replica_slots,
    )
    starts = _starts(problem, TABLE[:rows], published)
    relieved = [(slots, relieve(problem, slots, rounds)) for slots in starts]
    slots, peaks = min(relieved, key=lambda pair: score(problem, pair[1]))
    if total_time(problem, peaks) >= _time_without_replicas(problem):
        return unbalanced_plan(load_RE, main_E, replica_slots)
    return split(problem, slots, load_RE, main_E)


def _time_without_replicas(problem: Problem) -> int:
    ports = ports_without_replicas(problem)
    return (
        total_time(problem, find_peaks(problem, ports, range(problem.ranks))) - problem.costs.plan
    )


def _starts(problem: Problem, table: tuple[Recipe, ...], published: Plan) -> list[Slots]:
    """What is relieved: the most promising first, the order above on ties."""
    pairs = list_pairs(problem)
    candidates = [build(problem, pairs, recipe) for recipe in table]
    starts = [(slots, 100) for slots in candidates if slots is not None]
    starts += [(_slots_of(problem, published), 100), (Slots.empty(problem), 100)]
    starts.append((level(problem), 100 + LEVEL_DOUBT))
    starts.sort(key=lambda start: _promise(problem, ports_of(problem, start[0])) // 100 * start[1])
    return [slots for slots, _ in starts[: max(1, RELIEVED // problem.ranks**2)]]


def _slots_of(problem: Problem, plan: Plan) -> Slots:
    """The plan's replicas with what they execute as quotas, those that execute nothing left out."""
    slots = Slots.empty(problem)
    per_rank = plan.expert_G.numel() // problem.ranks
    for n in range(len(slots.expert_N)):
        rank, position = divmod(n, problem.slots_per_rank)
        slot = (rank + 1) * per_rank - problem.slots_per_rank + position
        slots.quota_N[n] = int(plan.assignments_RG[:, slot].sum())
        if slots.quota_N[n]:
            slots.expert_N[n] = int(plan.expert_G[slot])
    return slots


def _promise(problem: Problem, ports: Ports) -> int:
    """The score that relief can reach: each peak halfway down to its domain's mean."""
    size = problem.ranks_per_domain
    domains = []
    for domain in range(problem.domains):
        ranks = problem.ranks_of(domain)
        peaks = find_peaks(problem, ports, ranks)
        load = sum(ports.load_R[r] for r in ranks)
        far = max(sum(ports.far_in_R[r] for r in ranks), sum(ports.far_out_R[r] for r in ranks))
        near = max(
            sum(ports.near_in(r) for r in ranks), sum(ports.near_out(problem, r) for r in ranks)
        )
        domains.append(
            Peaks(
                load=(peaks.load + load // size) // 2,
                far=(peaks.far + far // size) // 2,
                near=(peaks.near + near // size) // 2,
                copies=peaks.copies,
            )
        )
    fields = ("load", "far", "near", "copies")
    return score(problem, Peaks(*(max(getattr(d, field) for d in domains) for field in fields)))


def split(problem: Problem, slots: Slots, load_RE: Tensor, main_E: Tensor) -> Plan:
    """The Plan of ``slots``: each source serves itself, then its domain, then what leaves a domain.

    In a domain, the sources in ascending rank lie on one line that the instances' parts for their
    own domain cut, ascending; over the cluster, what leaves the domains lies on a second line that
    the outside parts cut.
    """
    plan = unbalanced_plan(load_RE, main_E, problem.slots_per_rank)
    per_rank = plan.expert_G.numel() // problem.ranks
    main_slot_E = main_slots(main_E, problem.ranks, problem.slots_per_rank).tolist()
    scratch = ports_of(problem, Slots.empty(problem))  # serving writes ports; nobody reads these
    slot_of = _packed_slots(problem, slots, per_rank)
    for n, slot in slot_of.items():
        plan.expert_G[slot] = slots.expert_N[n]
    for expert in dict.fromkeys(x for x in slots.expert_N if x >= 0):
        plan.assignments_RG[:, main_slot_E[expert]] = 0
        instances = instances_of(problem, slots, expert)
        slot_of_rank = {
            i.rank: main_slot_E[expert] if i.slot < 0 else slot_of[i.slot] for i in instances
        }
        leaving = []
        for domain in range(problem.domains):
            leaves = serve_domain(problem, scratch, expert, instances, domain, -1)
            leaving += leaves.items()
            here = [i for i in instances if problem.domain_of(i.rank) == domain]
            own = {i.rank: i.own for i in here}
            for rank, amount in own.items():
                plan.assignments_RG[rank, slot_of_rank[rank]] += amount
            demands = [
                (source, problem.load_ER[expert][source] - left - own.get(source, 0))
                for source, left in leaves.items()
            ]
            _cut(plan, slot_of_rank, demands, [(i, i.quota - i.own - i.outside) for i in here])
        _cut(plan, slot_of_rank, leaving, [(i, i.outside) for i in instances])
    return plan


def _packed_slots(problem: Problem, slots: Slots, per_rank: int) -> dict[int, int]:
    """Replica slot n -> slot g of the Plan; the slots of a rank fill from the left."""
    packed, used_R = {}, [0] * problem.ranks
    for n, expert in enumerate(slots.expert_N):
        if expert >= 0:
            rank = n // problem.slots_per_rank
            packed[n] = (rank + 1) * per_rank - problem.slots_per_rank + used_R[rank]
            used_R[rank] += 1
    return packed


def _cut(
    plan: Plan,
    slot_of_rank: dict[int, int],
    demands: list[tuple[int, int]],
    rooms: list[tuple[Instance, int]],
) -> None:
    """Lay the (source, amount) demands on a line and cut it by the (instance, amount) rooms."""
    line = list(accumulate((amount for _, amount in demands), initial=0))
    cuts = list(accumulate((amount for _, amount in rooms), initial=0))
    for (source, _), start, end in zip(demands, line, line[1:]):
        for (instance, _), first, last in zip(rooms, cuts, cuts[1:]):
            overlap = min(end, last) - max(start, first)
            if overlap > 0:
                plan.assignments_RG[source, slot_of_rank[instance.rank]] += overlap
