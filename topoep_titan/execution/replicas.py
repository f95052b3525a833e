"""Which expert copies a plan asks this rank to send and receive, and the sum of their gradients.

Letters: R ranks, E experts, e main experts a rank, S replica slots a rank, G = R*(e+S) slots.

A copy goes from a main instance to a replica slot in forward; its gradient takes the same way back.
Both ends know both addresses, so two-sided and one-sided transports read the same list; kernels
read the plan itself, in device memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from topoep_kernels.transfers import main_places, reduce_gradients
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
    expert_G: Tensor  # int32, the plan's, on the layer's device
    place_E: Tensor  # int32, there too: rank * e + index of each expert's main instance

    def among(self, wanted: Callable[[int], bool]) -> "Copies":
        """Those between this rank and the peers that are ``wanted``."""
        return replace(
            self,
            outgoing=tuple(copy for copy in self.outgoing if wanted(copy.peer)),
            incoming=tuple(copy for copy in self.incoming if wanted(copy.peer)),
        )


def plan_copies(
    plan: Plan, main_E: Tensor, ranks: int, rank: int, device: torch.device
) -> Copies | None:
    """This rank's copies under a plan on the CPU; None, on all ranks alike, without any replica."""
    expert_G = plan.expert_G.tolist()
    place_E = main_places(main_E)
    places = place_E.tolist()
    per_rank = len(expert_G) // ranks
    mains = len(places) // ranks
    everywhere = sorted(
        (places[expert] // mains, g // per_rank, g % per_rank - mains, places[expert] % mains)
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
        expert_G=plan.expert_G.to(device),
        place_E=place_E.to(device),
    )


def add_arrived(total_eFD: Tensor, region_ReFD: Tensor, copies: Copies, rank: int) -> None:
    """Add to the mains' gradients, in place, those of their replicas that lie in ``region_ReFD``.

    By ascending host, so that the order of every sum is fixed; regions of others are not read."""
    if total_eFD.is_cuda and total_eFD.dtype == torch.float32:
        reduce_gradients(total_eFD, region_ReFD, copies.expert_G, rank)
        return
    for copy in copies.outgoing:
        total_eFD[copy.main] += region_ReFD[copy.peer, copy.main]
