"""FlexMoE: expand the most loaded expert, shrink the least loaded one, then migrate copies.

Source: FlexMoE (SIGMOD 2023, arXiv 2304.03946), the paper's baseline [21] of section 6.1; its code
is not public, so this follows the text. Copies of an expert (vExperts) share its load evenly.
While the predicted time falls: expand the expert with the largest load per copy onto the best rank;
without a free slot, shrink the one with the smallest. Then swap copies where this cheapens the
synchronisation of an expert's copies and costs no time.

Predicted time = max over ranks of the sum over its experts of
    3*t_ffn*share + 4*S_tok*(share - own tokens)/bw + 2*|W|/bw if the expert has several copies
with ``bw`` the slowest link in use. Adaptations: it plans the exact load of one microbatch, where
the original adapts over steps; a copy costs a pull and a gradient push; the expert to expand is
sought on the slowest rank, as with several mains a rank no other can shorten the maximum.
``flexmoe`` keeps mains pinned, ``flexmoe_free`` is the published form, in which they move too.
Tokens take the copy on their own rank first and split the rest in proportion.
"""

import numpy as np
from torch import Tensor

from topoep_titan.cluster import Cluster, ModelDims
from topoep_titan.cluster.cost_model import unit_costs
from topoep_titan.planning.plan import Plan
from topoep_titan.planning.quotas import (
    even_shares,
    mains_by_rank,
    own_rank_then_proportional,
    plan_from_quotas,
)


def flexmoe(
    load_RE: Tensor,
    *,
    main_E: Tensor,
    cluster: Cluster,
    model_dims: ModelDims,
    replica_slots: int,
) -> Plan:
    """Expand, shrink and migrate replicas; mains stay."""
    return _Scheduler(load_RE, main_E, cluster, model_dims, replica_slots, pinned=True).plan()


def flexmoe_free(
    load_RE: Tensor,
    *,
    main_E: Tensor,
    cluster: Cluster,
    model_dims: ModelDims,
    replica_slots: int,
) -> Plan:
    """Expand, shrink and migrate any instance of any expert."""
    return _Scheduler(load_RE, main_E, cluster, model_dims, replica_slots, pinned=False).plan()


class _Scheduler:
    """The placement and, kept in step with it, the predicted time of each rank.

    ``hosts[x]``: ranks of expert x. ``time_R``: int64 picoseconds.
    """

    def __init__(
        self,
        load_RE: Tensor,
        main_E: Tensor,
        cluster: Cluster,
        dims: ModelDims,
        replica_slots: int,
        pinned: bool,
    ):
        self.load_RE, self.load = load_RE, load_RE.numpy()
        self.ranks, self.experts = load_RE.shape
        self.total = load_RE.sum(0).tolist()
        self.main = main_E.tolist()
        self.cost = unit_costs(cluster, dims)
        self.cluster = cluster
        self.pinned = pinned
        self.slots_per_rank = self.experts // self.ranks + replica_slots
        self.hosted = mains_by_rank(main_E, self.ranks)
        self.hosts = [{rank} for rank in self.main]
        self.time_R = sum(self._expert_time(x, self.hosts[x]) for x in range(self.experts))

    def plan(self) -> Plan:
        while self._expand():
            pass
        while self._migrate():
            pass
        quota_of = {x: self._quotas(x, hosts) for x, hosts in enumerate(self.hosts)}
        return plan_from_quotas(
            self.load_RE, self.hosted, self.slots_per_rank, quota_of, own_rank_then_proportional
        )

    def _expand(self) -> bool:
        """Commit the best expansion of the slowest rank's hottest expert if it saves time."""
        slowest = int(self.time_R.argmax())
        growing = [x for x in self.hosted[slowest] if len(self.hosts[x]) < self.ranks]
        if not growing:
            return False
        hottest = max(growing, key=lambda x: (self._per_copy(x), -x))
        coldest = min(
            self._removable(), key=lambda copy: (self._per_copy(copy[0]), copy), default=None
        )
        best = None
        for rank in range(self.ranks):
            if rank in self.hosts[hottest]:
                continue
            changes = {hottest: self.hosts[hottest] | {rank}}
            if len(self.hosted[rank]) == self.slots_per_rank:
                if coldest is None or coldest[1] != rank or coldest[0] == hottest:
                    continue
                changes[coldest[0]] = self.hosts[coldest[0]] - {rank}
            time_R = self._time_after(changes)
            if best is None or time_R.max() < best[0].max():
                best = time_R, changes
        if best is None or best[0].max() >= self.time_R.max():
            return False
        self._commit(*best)
        return True

    def _migrate(self) -> bool:
        """Commit the first swap of two copies that cheapens synchronisation and costs no time."""
        copies = sorted(self._removable())
        for i, (x, a) in enumerate(copies):
            for y, b in copies[i + 1 :]:
                if b in self.hosts[x] or a in self.hosts[y]:
                    continue
                changes = {x: self.hosts[x] - {a} | {b}, y: self.hosts[y] - {b} | {a}}
                before = self._sync(self.hosts[x]) + self._sync(self.hosts[y])
                if self._sync(changes[x]) + self._sync(changes[y]) >= before:
                    continue
                time_R = self._time_after(changes)
                if time_R.max() <= self.time_R.max():
                    self._commit(time_R, changes)
                    return True
        return False

    def _removable(self) -> list[tuple[int, int]]:
        """(expert, rank) of every copy that may leave: not the last one and not a pinned main."""
        return [
            (x, rank)
            for x, hosts in enumerate(self.hosts)
            if len(hosts) > 1
            for rank in hosts
            if not (self.pinned and rank == self.main[x])
        ]

    def _commit(self, time_R: np.ndarray, changes: dict[int, set[int]]) -> None:
        self.time_R = time_R
        for x, hosts in changes.items():
            for rank in self.hosts[x] - hosts:
                self.hosted[rank].remove(x)
            for rank in hosts - self.hosts[x]:
                self.hosted[rank].append(x)
            self.hosts[x] = hosts

    def _per_copy(self, x: int) -> int:
        return self.total[x] // len(self.hosts[x])

    def _quotas(self, x: int, hosts: set[int]) -> dict[int, int]:
        return dict(zip(sorted(hosts), even_shares(self.total[x], len(hosts))))

    def _sync(self, hosts: set[int]) -> int:
        """Picoseconds to pull the parameters and push the gradients of one copy."""
        if len(hosts) == 1:
            return 0
        nodes = {self.cluster.node_of(rank) for rank in hosts}
        return 2 * (self.cost.copy_near if len(nodes) == 1 else self.cost.copy_far)

    def _expert_time(self, x: int, hosts: set[int]) -> np.ndarray:
        quotas = self._quotas(x, hosts)
        rank_I = np.array(list(quotas))
        quota_I = np.array(list(quotas.values()))
        remote_I = np.maximum(quota_I - self.load[rank_I, x], 0)
        token = self.cost.token_near if self.cluster.nodes == 1 else self.cost.token_far
        time_R = np.zeros(self.ranks, dtype=np.int64)
        time_R[rank_I] = self.cost.assignment * quota_I + 2 * token * remote_I + self._sync(hosts)
        return time_R

    def _time_after(self, changes: dict[int, set[int]]) -> np.ndarray:
        return self.time_R + sum(
            self._expert_time(x, hosts) - self._expert_time(x, self.hosts[x])
            for x, hosts in changes.items()
        )
