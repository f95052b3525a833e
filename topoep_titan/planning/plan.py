"""The contract of the project: a Plan says which expert sits in each slot and who executes what.

Letters: R ranks of the EP group, E logical experts, e = E/R main experts a rank, S replica slots a
rank, G = R*(e+S) physical slots, T tokens of one rank, K top-k.

Slot g is on rank ``g // (e+S)``. The first e slots of a rank hold its main experts in ascending
logical id; its replica slots fill from the left in the order of placement. The instances of an
expert are ordered by ascending g.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from topoep_titan.errors import InputError

MAX_ASSIGNMENTS = 2**31 - 1  # of one load in total: counts are int32 in a Plan


class PlanError(ValueError):
    """A plan breaks a law of the contract: a defect of a planner, not of the user's input."""


@dataclass(frozen=True)
class Plan:
    expert_G: Tensor  # int32 (G,): logical expert in slot g, -1 = empty
    assignments_RG: Tensor  # int32 (R, G): source rank r's assignments executed in slot g

    @property
    def num_replicas(self) -> int:
        """Occupied replica slots: instances beyond the E mains."""
        return int((self.expert_G >= 0).sum()) - int(self.expert_G.max()) - 1


@dataclass(frozen=True)
class RowPlanner:
    """A planner that sees the tokens: two pure functions, with an all-gather between them.

    ``propose(ids_TK, load_RE, rank=)`` gives a proposal whose integer tensor ``rows_CX`` every rank
    must have of all; ``finish(proposal, rows_RCX)`` gives the Plan, the same on all ranks, and the
    slots (T, K) of this rank's assignments.
    """

    propose: Callable
    finish: Callable[..., tuple[Plan, Tensor]]


@dataclass(frozen=True)
class DevicePlanner:
    """A planner that takes the load from device memory and leaves the Plan there."""

    plan: Callable[[Tensor], Plan]

    def __call__(self, load_RE: Tensor) -> Plan:
        return self.plan(load_RE)


def check_load(load_RE: Tensor, main_E: Tensor | None, replica_slots: int) -> None:
    """Raise InputError unless the planners' common input is well formed.

    ``load_RE``: non-negative integers (R, E), E a multiple of R, at most 2**31 - 1 assignments.
    ``main_E``: rank of each expert's main instance, exactly E/R experts on each rank; None stands
    for the contiguous default.
    """
    if load_RE.ndim != 2 or load_RE.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"load must be a matrix of int32 or int64 counts (ranks, experts), got shape "
            f"{tuple(load_RE.shape)} of {str(load_RE.dtype).removeprefix('torch.')}"
        )
    ranks, experts = load_RE.shape
    if ranks == 0 or experts == 0 or experts % ranks:
        raise InputError(
            f"{experts} experts are not a multiple of {ranks} ranks; every rank must hold the same "
            "number of main experts (pad the experts, or change the expert-parallel degree)"
        )
    if int(load_RE.min()) < 0:
        rank, expert = (load_RE < 0).nonzero()[0].tolist()
        raise InputError(
            f"load of rank {rank}, expert {expert} is {int(load_RE[rank, expert])}; "
            "counts must not be negative"
        )
    if float(load_RE.double().sum()) > MAX_ASSIGNMENTS:
        raise InputError(
            f"load holds {float(load_RE.double().sum()):.0f} assignments, more than "
            f"{MAX_ASSIGNMENTS}, the most that int32 counts carry; plan smaller microbatches"
        )
    if isinstance(replica_slots, bool) or not isinstance(replica_slots, int) or replica_slots < 0:
        raise InputError(f"replica_slots is {replica_slots!r}; give an integer of at least 0")
    if main_E is not None:
        check_mains(main_E, ranks, experts)


def check_mains(main_E: Tensor, ranks: int, experts: int) -> None:
    """Raise InputError unless ``main_E`` puts exactly E/R experts on each rank."""
    if main_E.shape != (experts,) or main_E.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"main must hold one integer rank for each of the {experts} experts, got shape "
            f"{tuple(main_E.shape)} of {str(main_E.dtype).removeprefix('torch.')}"
        )
    if int(main_E.min()) < 0 or int(main_E.max()) >= ranks:
        bad = int(main_E.min()) if int(main_E.min()) < 0 else int(main_E.max())
        raise InputError(f"main names rank {bad}; ranks are 0 to {ranks - 1}")
    mains_R = torch.bincount(main_E.long(), minlength=ranks)
    if int(mains_R.max()) != experts // ranks:
        rank = int((mains_R != experts // ranks).nonzero()[0])
        raise InputError(
            f"main puts {int(mains_R[rank])} experts on rank {rank}; "
            f"every rank must hold exactly {experts // ranks}"
        )


def contiguous_mains(ranks: int, experts: int) -> Tensor:
    """int64 (E,): the default placement, experts [r*e, (r+1)*e) on rank r."""
    return torch.arange(experts) // (experts // ranks)


def main_slots(main_E: Tensor, ranks: int, replica_slots: int) -> Tensor:
    """int64 (E,): the slot of each expert's main instance."""
    experts = main_E.numel()
    mains = experts // ranks
    by_rank = torch.argsort(main_E, stable=True)  # ascending id within a rank
    slot_E = torch.empty(experts, dtype=torch.int64, device=main_E.device)
    index = torch.arange(experts, device=main_E.device)
    slot_E[by_rank] = index // mains * (mains + replica_slots) + index % mains
    return slot_E


def unbalanced_plan(load_RE: Tensor, main_E: Tensor, replica_slots: int) -> Plan:
    """Every assignment on its expert's main instance, all replica slots empty."""
    ranks, experts = load_RE.shape
    slot_E = main_slots(main_E, ranks, replica_slots)
    slots = experts + ranks * replica_slots
    expert_G = load_RE.new_full((slots,), -1, dtype=torch.int32)
    expert_G[slot_E] = torch.arange(experts, dtype=torch.int32, device=load_RE.device)
    assignments_RG = load_RE.new_zeros(ranks, slots, dtype=torch.int32)
    assignments_RG[:, slot_E] = load_RE.int()
    return Plan(expert_G, assignments_RG)


def check_plan(
    plan: Plan, load_RE: Tensor, main_E: Tensor, replica_slots: int, *, mains_fixed: bool = True
) -> None:
    """Raise PlanError with the first violated law.

    Laws: shape, mains fixed (skipped with ``mains_fixed=False``), at most one instance of an
    expert a rank, every expert present, non-negative counts, reachability (nothing runs in an
    empty slot), conservation (an expert's slots together execute ``load_RE``). Capacity (S replica
    slots a rank) is the shape of ``expert_G``.
    """
    ranks, experts = load_RE.shape
    per_rank = experts // ranks + replica_slots
    slots = ranks * per_rank
    expert_G, assignments_RG = plan.expert_G.long(), plan.assignments_RG.long()
    if plan.expert_G.shape != (slots,) or plan.assignments_RG.shape != (ranks, slots):
        raise PlanError(
            f"capacity: {ranks} ranks of {per_rank} slots need expert_G ({slots},) and "
            f"assignments_RG ({ranks}, {slots}), got {tuple(plan.expert_G.shape)} and "
            f"{tuple(plan.assignments_RG.shape)}"
        )
    if plan.expert_G.dtype != torch.int32 or plan.assignments_RG.dtype != torch.int32:
        raise PlanError(
            f"dtype: a Plan is int32, got {plan.expert_G.dtype} and {plan.assignments_RG.dtype}"
        )
    outside = (expert_G < -1) | (expert_G >= experts)
    if outside.any():
        slot = int(outside.nonzero()[0])
        raise PlanError(f"slot {slot} holds expert {int(expert_G[slot])} of {experts}")
    if mains_fixed:
        slot_E = main_slots(main_E, ranks, replica_slots)
        moved = expert_G[slot_E] != torch.arange(experts)
        if moved.any():
            expert = int(moved.nonzero()[0])
            slot = int(slot_E[expert])
            raise PlanError(
                f"mains fixed: slot {slot} of rank {slot // per_rank} must hold expert {expert}, "
                f"it holds {int(expert_G[slot])}"
            )
    instances_RE = torch.zeros(ranks, experts + 1, dtype=torch.int64)
    rank_G = torch.arange(slots) // per_rank
    instances_RE.index_put_((rank_G, expert_G), torch.ones(slots, dtype=torch.int64), True)
    instances_RE = instances_RE[:, :experts]  # index -1 (empty) counted in the last column
    if int(instances_RE.max()) > 1:
        rank, expert = (instances_RE > 1).nonzero()[0].tolist()
        raise PlanError(
            f"one instance a rank: rank {rank} holds expert {expert} "
            f"{int(instances_RE[rank, expert])} times"
        )
    absent = instances_RE.sum(0) == 0
    if absent.any():
        raise PlanError(f"every expert present: expert {int(absent.nonzero()[0])} has no instance")
    if int(assignments_RG.min()) < 0:
        rank, slot = (assignments_RG < 0).nonzero()[0].tolist()
        raise PlanError(
            f"non-negative: rank {rank} sends {int(assignments_RG[rank, slot])} to slot {slot}"
        )
    stray = assignments_RG[:, expert_G < 0]
    if stray.any():
        rank = int(stray.nonzero()[0, 0])
        raise PlanError(
            f"reachability: rank {rank} sends {int(stray[rank].sum())} assignments to empty slots"
        )
    executed_RE = torch.zeros(ranks, experts, dtype=torch.int64)
    occupied = expert_G >= 0
    executed_RE.index_add_(1, expert_G[occupied], assignments_RG[:, occupied])
    if not torch.equal(executed_RE, load_RE.long()):
        rank, expert = (executed_RE != load_RE).nonzero()[0].tolist()
        raise PlanError(
            f"conservation: rank {rank} has {int(load_RE[rank, expert])} assignments to expert "
            f"{expert}, the plan executes {int(executed_RE[rank, expert])}"
        )


def check_slots(plan: Plan, slot_TK: Tensor, rank: int) -> None:
    """Raise PlanError unless source ``rank`` uses each slot as often as planned."""
    count_G = torch.bincount(slot_TK.flatten().cpu(), minlength=plan.expert_G.numel())
    wrong_G = count_G != plan.assignments_RG[rank]
    if wrong_G.any():
        slot = int(wrong_G.nonzero()[0])
        raise PlanError(
            f"slots: rank {rank} sends {int(count_G[slot])} assignments to slot {slot}, the plan "
            f"says {int(plan.assignments_RG[rank, slot])}"
        )


def cut_assignments(plan: Plan, ids_TK: Tensor, rank: int) -> Tensor:
    """int64 (T, K): the slot that executes each assignment of source ``rank`` (the cut rule).

    A source's assignments of expert x, in token order, are cut by the cumulative
    ``assignments_RG[rank]`` over x's instances in ascending slot. Assignments sorted by (expert,
    token) therefore meet the slots sorted by (expert, slot), each repeated by its count.
    """
    order_N = torch.argsort(ids_TK.reshape(-1), stable=True)
    slot_order_G = torch.argsort(plan.expert_G, stable=True)  # empty slots first, with count 0
    slot_N = torch.repeat_interleave(
        slot_order_G,
        plan.assignments_RG[rank][slot_order_G].long(),
        output_size=order_N.numel(),
    )
    slot_TK = torch.empty_like(order_N)
    slot_TK[order_N] = slot_N
    return slot_TK.view(ids_TK.shape)
