"""Which expert copies a plan asks this rank to send and receive.

Letters: R ranks, E experts, e main experts a rank, S replica slots a rank.

A copy goes from a main instance to a replica slot in forward; its gradient takes the same way back.
Both ends know both addresses, so two-sided and one-sided transports read the same list.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from topoep_titan.planning.plan import Plan


@dataclass(frozen=True)
class Copy:
    """One expert copy between this rank and ``peer``."""

    peer: int  # the other rank: the host of an outgoing copy, the main's rank of an incoming one
    main: int  # index (0..e-1) of the main instance on its rank
    slot: int  # replica slot (0..S-1) on the host


@dataclass(frozen=True)
class Copies:
    """All copies of one rank, ordered by (main's rank, host, slot) on every rank alike."""

    outgoing: tuple[Copy, ...]
    incoming: tuple[Copy, ...]


def plan_copies(plan: Plan, main_E: Tensor, ranks: int, rank: int) -> Copies | None:
    """This rank's copies under a plan on the CPU; None, on all ranks alike, without any replica."""
    expert_G = plan.expert_G.tolist()
    home_E = main_E.tolist()
    per_rank = len(expert_G) // ranks
    mains = len(home_E) // ranks
    index_E = torch.empty(len(home_E), dtype=torch.int64)  # ascending id within a rank
    index_E[torch.argsort(main_E, stable=True)] = torch.arange(len(home_E)) % mains
    index_E = index_E.tolist()
    everywhere = sorted(
        (home_E[expert], g // per_rank, g % per_rank - mains, index_E[expert])
        for g, expert in enumerate(expert_G)
        if expert >= 0 and g % per_rank >= mains
    )
    if not everywhere:
        return None
    return Copies(
        outgoing=tuple(
            Copy(host, main, slot) for home, host, slot, main in everywhere if home == rank
        ),
        incoming=tuple(
            Copy(home, main, slot) for home, host, slot, main in everywhere if host == rank
        ),
    )
