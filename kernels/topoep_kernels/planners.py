"""The planners on the device: load in device memory, plan in device memory, nothing on the host.

Letters: R ranks, E experts, e = E/R mains a rank, S replica slots a rank, G = E + R*S slots. Shapes
are checked; values cannot be without waiting for the device, and are trusted: no negative counts,
fewer than 2**31 assignments, prices as the CPU planners accept them.
"""

from ctypes import c_longlong

import torch
from torch import Tensor

from topoep_kernels.device import TOO_LARGE, launch, library_of


def order_mains(main_E: Tensor) -> Tensor:
    """int32 (E,): the experts by rank of their main instance, then by id. Once per placement."""
    return torch.argsort(main_E, stable=True).to(torch.int32)


def plan_topoep(
    load_RE: Tensor,
    mains_E: Tensor,
    *,
    replica_slots: int,
    ranks_per_node: int,
    token_bytes: int,
    expert_bytes: int,
    token_far: int,
    token_near: int,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """TopoEP as published: int32 ``expert_G`` (G,) and ``assignments_RG`` (R, G), written into
    ``out`` when given (as a CUDA graph wants). Row r of the latter is source rank r's split.

    ``load_RE``: int32; ``mains_E``: ``order_mains`` of the placement. Raises ValueError.
    """
    sizes = check_sizes(load_RE, mains_E, replica_slots, ranks_per_node)
    out = out or empty_plan(load_RE, replica_slots)
    prices = (token_bytes, expert_bytes, token_far, token_near)
    launch("plan_topoep", load_RE, mains_E, *sizes, *prices, *out)
    return out


def takes_joint(
    device: torch.device, *, ranks: int, experts: int, replica_slots: int, ranks_per_node: int,
    recipes: int,
) -> bool:  # fmt: skip
    """Whether ``plan_joint`` plans this shape on the device."""
    sizes = (ranks, experts, replica_slots, ranks_per_node, recipes)
    return _joint_workspace(device, *sizes) != TOO_LARGE


def _joint_workspace(device: torch.device, *sizes: int) -> int:
    """Bytes, or TOO_LARGE."""
    call = library_of(device).topoep_device_joint_workspace
    call.restype = c_longlong
    return call(*map(c_longlong, sizes))


def empty_plan(load_RE: Tensor, replica_slots: int) -> tuple[Tensor, Tensor]:
    """Uninitialised (expert_G, assignments_RG) beside the load."""
    ranks, experts = load_RE.shape
    slots = experts + ranks * replica_slots
    return load_RE.new_empty(slots), load_RE.new_empty(ranks, slots)


def check_sizes(
    load_RE: Tensor, mains_E: Tensor, replica_slots: int, ranks_per_node: int
) -> tuple[int, int, int, int]:
    """(R, E, S, g) of a well-formed problem, or ValueError."""
    if load_RE.ndim != 2 or load_RE.dtype != torch.int32 or mains_E.dtype != torch.int32:
        raise ValueError(
            f"the device plans int32 (R, E) loads and int32 mains, got {tuple(load_RE.shape)} of "
            f"{load_RE.dtype} and mains of {mains_E.dtype}"
        )
    ranks, experts = load_RE.shape
    if (
        ranks < 1 or experts % ranks or mains_E.shape != (experts,) or replica_slots < 0
        or ranks_per_node < 1 or ranks % ranks_per_node
    ):  # fmt: skip
        raise ValueError(
            f"{experts} experts on {ranks} ranks, {ranks_per_node} a node, {replica_slots} replica "
            f"slots and {tuple(mains_E.shape)} mains do not fit: ranks must divide experts, "
            "ranks_per_node must divide ranks"
        )
    return ranks, experts, replica_slots, ranks_per_node


def plan_joint(
    load_RE: Tensor,
    mains_E: Tensor,
    *,
    replica_slots: int,
    ranks_per_node: int,
    token_bytes: int,
    expert_bytes: int,
    prices: tuple[int, int, int, int, int, int],
    balance_weight: int,
    table: Tensor,
    rounds: int,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The joint planner, for shapes that ``takes_joint``; otherwise as ``plan_topoep``.

    ``prices``: of one assignment, far token, near token, far copy, near copy, plan. ``table``:
    int32 (rows, 5) on the host, the recipes of its candidates. Raises ValueError.
    """
    sizes = check_sizes(load_RE, mains_E, replica_slots, ranks_per_node)
    if table.dtype != torch.int32 or table.is_cuda or table.shape[1:] != (5,):
        raise ValueError(f"table must be int32 (rows, 5) on the host, got {tuple(table.shape)}")
    table = table.contiguous()
    out = out or empty_plan(load_RE, replica_slots)
    nbytes = _joint_workspace(load_RE.device, *sizes, len(table))
    if nbytes == TOO_LARGE:
        raise ValueError(
            f"the device does not plan {sizes[0]} ranks, {ranks_per_node} a node, {sizes[1]} "
            f"experts, {replica_slots} slots and {len(table)} recipes: more than 96 ranks a node, "
            "16 recipes or a block's shared memory; plan on the host"
        )
    workspace = load_RE.new_empty(nbytes, dtype=torch.uint8)
    launch(
        "plan_joint", load_RE, mains_E, *sizes, token_bytes, expert_bytes, *prices, balance_weight,
        table.data_ptr(), len(table), rounds, workspace, *out,
    )  # fmt: skip
    return out
