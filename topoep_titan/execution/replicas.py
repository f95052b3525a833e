"""Parameters to the replica slots in forward, replica gradients home in backward.

Letters: R ranks, e main experts a rank, S replica slots a rank.

One exchange per parameter tensor and direction. A main rank adds the gradients of its replicas in
ascending rank order of their hosts, in fp32 (float64 when the layer runs in float64), so that a
run repeats bit for bit. Optimizer state and checkpoints see main instances only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from topoep_titan.execution.transport import Transport
from topoep_titan.planning.plan import Plan


@dataclass(frozen=True)
class Copies:
    """The copies that one rank sends and receives under a plan; host integers."""

    send_experts: list[int]  # local indices of mains, grouped by host rank, then slot
    send: list[int]  # R: copies to each host rank
    receive_slots: list[int]  # replica slots (0..S-1), grouped by the main's rank, then slot
    receive: list[int]  # R: copies from each main rank


def plan_copies(plan: Plan, main_E: Tensor, ranks: int, rank: int) -> Copies | None:
    """What this rank sends and receives; None, on all ranks alike, when the plan has no replica."""
    expert_G, home = plan.expert_G.tolist(), main_E.tolist()
    per_rank = len(expert_G) // ranks
    mains = len(home) // ranks
    hosts = [  # (host rank, replica slot, expert)
        (slot // per_rank, slot % per_rank - mains, expert)
        for slot, expert in enumerate(expert_G)
        if expert >= 0 and slot % per_rank >= mains
    ]
    if not hosts:
        return None
    local_index = {expert: i for i, expert in enumerate(expert_G[rank * per_rank :][:mains])}
    outgoing = [(host, expert) for host, _, expert in hosts if home[expert] == rank]
    incoming = sorted((home[expert], slot) for host, slot, expert in hosts if host == rank)
    return Copies(
        send_experts=[local_index[expert] for _, expert in outgoing],
        send=[sum(host == r for host, _ in outgoing) for r in range(ranks)],
        receive_slots=[slot for _, slot in incoming],
        receive=[sum(source == r for source, _ in incoming) for r in range(ranks)],
    )


def pull_replicas(
    mains: tuple[Tensor, ...], copies: Copies, replica_slots: int, transport: Transport
) -> tuple[Tensor, ...]:
    """Each (e, ...) parameter of the mains to (S, ...) of this rank's replica slots.

    Empty slots are zero. All ranks of the group must call this, and its backward, together.
    """
    return _PullReplicas.apply(copies, replica_slots, transport, *mains)


class _PullReplicas(torch.autograd.Function):
    @staticmethod
    def forward(ctx, copies: Copies, replica_slots: int, transport: Transport, *mains: Tensor):
        ctx.copies, ctx.transport = copies, transport
        ctx.mains = [(main.shape, main.dtype) for main in mains]
        pulled = []
        for main in mains:
            received = transport.exchange(main[copies.send_experts], copies.send, copies.receive)
            slots = main.new_zeros(replica_slots, *main.shape[1:])
            slots[copies.receive_slots] = received
            pulled.append(slots)
        return tuple(pulled)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        copies, transport = ctx.copies, ctx.transport
        home = []
        for grad, (shape, dtype) in zip(grads, ctx.mains):
            arrived = transport.exchange(grad[copies.receive_slots], copies.receive, copies.send)
            total = grad.new_zeros(shape, dtype=torch.promote_types(dtype, torch.float32))
            start = 0
            for count in copies.send:  # one host after the other: the order of the sum is fixed
                # A host holds an expert at most once, so no index repeats within this call.
                index = torch.tensor(copies.send_experts[start : start + count], dtype=torch.int64)
                total.index_add_(
                    0, index.to(grad.device), arrived[start : start + count].to(total.dtype)
                )
                start += count
            home.append(total.to(dtype))
        return None, None, None, *home
