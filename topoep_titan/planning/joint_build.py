"""Builds one candidate of the joint planner from a recipe of targets: which experts to bring where,
how much each domain executes, and the replica slots that level its ranks.

Letters: R ranks, M domains of g ranks, E experts, S replica slots a rank.
"""

from dataclasses import dataclass

from topoep_titan.planning.joint_ports import Problem, Slots, ports_without_replicas


@dataclass(frozen=True)
class Recipe:
    """The targets that a candidate is built for."""

    copies: int  # far copies that may leave one rank, times (M-1)/3
    share: int  # eighths of a domain's slots for brought experts
    whole: int  # 1: place brought experts whole, 0: cut them to fit
    select_far: int  # per cent of the mean load: far port at which bringing stops
    fill_far: int  # per cent of the mean load: outside part that a rank's mains keep, 0 = all

    def most_copies(self, problem: Problem) -> int:
        return max(1, -(-self.copies * (problem.domains - 1) // 3))


@dataclass(frozen=True)
class Pair:
    """Bring ``expert`` into ``domain``, which has ``demand`` for it."""

    domain: int
    expert: int
    demand: int


def list_pairs(problem: Problem) -> list[Pair]:
    """Pairs that a far copy could pay for, at least half its price in far assignments; the 4*R*S
    most demanded, ties by expert, then domain."""
    costs = problem.costs
    least = max(1, costs.copy_far // max(1, 2 * costs.token_far))
    pairs = [
        Pair(domain, expert, demand)
        for expert, demand_M in enumerate(problem.demand_EM)
        for domain, demand in enumerate(demand_M)
        if demand >= least and domain != problem.home_E[expert]
    ]
    pairs.sort(key=lambda pair: -pair.demand)  # stable
    return pairs[: 4 * problem.ranks * problem.slots_per_rank]


def build(problem: Problem, pairs: list[Pair], recipe: Recipe) -> Slots | None:
    """The candidate's slots, or None when a brought expert finds none."""
    chosen = _select(problem, pairs, recipe)
    amount = _bring(problem, chosen)
    domain_load_M = _shift(problem, amount)
    level = max(problem.mean, max(-(-load // problem.ranks_per_domain) for load in domain_load_M))
    slots = Slots.empty(problem)
    for domain in range(problem.domains):
        if not _Fill(problem, recipe, amount, domain, level, slots).run():
            return None
    return slots


def _select(problem: Problem, pairs: list[Pair], recipe: Recipe) -> list[Pair]:
    """Greedy, most demanded first: relieve main ranks that receive too much from other domains,
    then domains that send too much."""
    most_in = problem.ranks_per_domain * problem.slots_per_rank * recipe.share // 8
    far = problem.mean * recipe.select_far // 100
    ports = ports_without_replicas(problem)
    far_in_R = list(ports.far_in_R)
    far_out_M = [
        sum(ports.far_out_R[r] for r in problem.ranks_of(d)) for d in range(problem.domains)
    ]
    sent_R, got_M = [0] * problem.ranks, [0] * problem.domains
    chosen: dict[int, None] = {}
    for relieve_mains in (True, False):
        for index, pair in enumerate(pairs):
            main = problem.main_E[pair.expert]
            if index in chosen or got_M[pair.domain] >= most_in:
                continue
            if sent_R[main] >= recipe.most_copies(problem):
                continue
            if relieve_mains and far_in_R[main] <= far:
                continue
            if not relieve_mains and far_out_M[pair.domain] <= far * problem.ranks_per_domain:
                continue
            chosen[index] = None
            sent_R[main] += 1
            got_M[pair.domain] += 1
            far_in_R[main] -= pair.demand
            far_out_M[pair.domain] -= pair.demand
    return [pairs[index] for index in sorted(chosen)]


def _bring(problem: Problem, chosen: list[Pair]) -> dict[int, dict[int, int]]:
    """expert -> domain -> assignments executed there: its own demand where the expert is hosted,
    the rest at home. Experts in the order of their first pair."""
    amount: dict[int, dict[int, int]] = {}
    for pair in chosen:
        home = problem.home_E[pair.expert]
        hosts = amount.setdefault(pair.expert, {home: problem.total_E[pair.expert]})
        hosts[pair.domain] = pair.demand
        hosts[home] -= pair.demand
    return amount


def _shift(problem: Problem, amount: dict[int, dict[int, int]]) -> list[int]:
    """Level the domains: the fullest hands work to the emptiest, spread over all experts that both
    host, because one lump would land on one in-port. Returns the domains' loads."""
    load_M = [0] * problem.domains
    for expert, home in enumerate(problem.home_E):
        for domain, executed in amount.get(expert, {home: problem.total_E[expert]}).items():
            load_M[domain] += executed
    level = problem.mean * problem.ranks_per_domain
    for _ in range(2 * problem.domains):
        full = max(range(problem.domains), key=lambda d: (load_M[d], -d))
        idle = min(range(problem.domains), key=lambda d: (load_M[d], d))
        shared = [hosts for hosts in amount.values() if full in hosts and idle in hosts]
        movable = sum(hosts[full] for hosts in shared)
        need = min(load_M[full] - level, level - load_M[idle], movable)
        if need <= 0:
            break
        before = given = 0
        for hosts in shared:
            before += hosts[full]
            moved = need * before // movable - given  # prefix rounding
            given += moved
            hosts[full] -= moved
            hosts[idle] += moved
        load_M[full] -= need
        load_M[idle] += need
        if load_M[full] > level and load_M[idle] < level:
            break  # nothing left to share
    return load_M


@dataclass(frozen=True)
class _Item:
    """Work that looks for a slot: a piece cut off a main of rank ``source``, a brought expert."""

    size: int
    expert: int
    source: int | None


class _Fill:
    """Fills the slots of one domain so that no rank executes more than ``level``, if it can."""

    def __init__(
        self,
        problem: Problem,
        recipe: Recipe,
        amount: dict[int, dict[int, int]],
        domain: int,
        level: int,
        slots: Slots,
    ):
        self.problem, self.recipe, self.level, self.slots = problem, recipe, level, slots
        self.ranks = problem.ranks_of(domain)
        self.brought = sorted(
            (_Item(hosts[domain], expert, None) for expert, hosts in amount.items()
             if hosts.get(domain) and problem.home_E[expert] != domain),
            key=lambda item: (-item.size, item.expert),
        )  # fmt: skip
        self.quota = {}  # main expert of this domain -> what its main executes
        self.outside = {}  # of it from other domains
        for rank in self.ranks:
            for x in problem.mains_R[rank]:
                self.quota[x] = amount[x][domain] if x in amount else problem.total_E[x]
                self.outside[x] = max(0, self.quota[x] - problem.demand_EM[x][domain])
        self.load = {r: sum(self.quota[x] for x in problem.mains_R[r]) for r in self.ranks}
        self.used = dict.fromkeys(self.ranks, 0)
        self.arrived = dict.fromkeys(self.ranks, 0)  # far copies
        self.most_arrivals = min(recipe.most_copies(problem), problem.slots_per_rank)
        self.free = len(self.ranks) * problem.slots_per_rank

    def run(self) -> bool:
        """False when a brought expert finds no slot."""
        items = []
        if self.recipe.whole:
            for item in self.brought:
                hosts = [r for r in self.ranks if self._may_host(r, item)]
                if not hosts:
                    return False
                self._put(min(hosts, key=lambda r: (self.load[r], r)), item, item.size)
        else:
            items += self.brought
        pending = len(items)  # brought experts without a slot: each has one reserved
        for rank in self.ranks:
            items += self._shed(rank)
        for item in sorted(items, key=lambda item: (-item.size, item.expert)):
            pending -= item.source is None
            if not self._place(item, pending):
                return False
        return True

    def _shed(self, rank: int) -> list[_Item]:
        """Pieces cut off the rank's mains until it is at the level and its mains keep no more than
        the far target from outside. A piece carries outside work first."""
        problem, recipe = self.problem, self.recipe
        mains = problem.mains_R[rank]
        over = self.load[rank] - self.level
        far_over = 0
        if recipe.fill_far:
            keep = problem.mean * recipe.fill_far // 100
            far_over = sum(self.outside[x] for x in mains) - keep
        pieces = []
        while over > 0 or far_over > 0:
            if far_over > 0 and far_over > over:  # the main with most outside work
                x = max(mains, key=lambda x: min(self.quota[x], self.outside[x]))
                size = min(self.quota[x], self.outside[x], far_over)
                if size == 0:
                    far_over = 0
                    continue
            else:  # the smallest main that covers `over`, else the largest
                covering = [x for x in mains if self.quota[x] >= over]
                if covering:
                    x = min(covering, key=lambda x: self.quota[x])
                else:
                    x = max(mains, key=lambda x: self.quota[x])
                size = min(over, self.quota[x])
                if size == 0:
                    break
            from_outside = min(size, self.outside[x])
            self.quota[x] -= size
            self.outside[x] -= from_outside
            self.load[rank] -= size
            over -= size
            far_over -= from_outside
            pieces.append(_Item(size, x, rank))
        return pieces

    def _place(self, item: _Item, pending: int) -> bool:
        """Put the item into slots, cut where room ends; False for a brought expert without any."""
        foreign = item.source is None
        rest, last = item.size, None
        while rest:
            must = foreign and last is None
            hosts = [r for r in self.ranks if self._may_host(r, item)]
            if not hosts or not (must or self.free > pending):
                break
            rank = min(hosts, key=lambda r: self._fit(r, rest))
            room = self.level - self.load[rank]
            if room <= 0 and not must:
                break
            cut = 0 < room < rest and self.free - 1 > pending
            last = self._put(rank, item, room if cut else rest)
            rest -= room if cut else rest
        if foreign and last is None:
            return False
        if rest and foreign:  # no more slots: its last instance takes the rest
            self.slots.quota_N[last] += rest
            self.load[last // self.problem.slots_per_rank] += rest
        elif rest:
            self.load[item.source] += rest  # stays on the main
        return True

    def _fit(self, rank: int, rest: int) -> tuple[int, int, int]:
        """Best first: the smallest room that takes the rest, else the largest room; lowest rank."""
        room = self.level - self.load[rank]
        return (0, room, rank) if room >= rest else (1, -room, rank)

    def _may_host(self, rank: int, item: _Item) -> bool:
        first = rank * self.problem.slots_per_rank
        return (
            self.used[rank] < self.problem.slots_per_rank
            and rank != item.source
            and not (item.source is None and self.arrived[rank] >= self.most_arrivals)
            and item.expert not in self.slots.expert_N[first : first + self.used[rank]]
        )

    def _put(self, rank: int, item: _Item, amount: int) -> int:
        slot = rank * self.problem.slots_per_rank + self.used[rank]
        self.slots.expert_N[slot] = item.expert
        self.slots.quota_N[slot] = amount
        self.used[rank] += 1
        self.arrived[rank] += item.source is None
        self.load[rank] += amount
        self.free -= 1
        return slot
