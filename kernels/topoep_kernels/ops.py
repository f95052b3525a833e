"""One Python function for each compiled function: tensors in, tensors out, errors raised.

Letters: R ranks, E experts, S replica slots a rank, G = E + R*S slots. Prices are integer
picoseconds; what they mean is the caller's business.
"""

from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from topoep_kernels.library import cpu_library

_ERRORS = {  # codes of csrc/planner/planner.cpp
    1: "sizes must satisfy: ranks divide experts, ranks_per_node divides ranks, no negative "
    "replica_slots, ranks * slots below 2**31",
    2: "main_E must put exactly E/R experts on every rank",
    3: "load_RE holds a negative count",
    4: "load_RE holds more than 2**31 - 1 assignments",
    5: "a price is negative, or prices times assignments exceed 2**61 picoseconds",
    6: "balance_weight, table, rows or rounds is out of range",
    7: "out of memory",
    8: "the plan's counts are not those of the ids",
}


def plan_topoep(
    load_RE: Tensor,
    main_E: Tensor,
    *,
    replica_slots: int,
    ranks_per_node: int,
    token_bytes: int,
    expert_bytes: int,
    token_far: int,
    token_near: int,
) -> tuple[Tensor, Tensor]:
    """TopoEP as published: int32 ``expert_G`` (G,) and ``assignments_RG``. Raises ValueError."""
    call = cpu_function("topoep_plan_topoep", c_int64, c_int64, c_int64, c_int64)
    prices = (token_bytes, expert_bytes, token_far, token_near)
    return _plan(call, load_RE, main_E, replica_slots, ranks_per_node, prices)


def plan_joint(
    load_RE: Tensor,
    main_E: Tensor,
    *,
    replica_slots: int,
    ranks_per_node: int,
    token_bytes: int,
    expert_bytes: int,
    prices: tuple[int, int, int, int, int, int],
    balance_weight: int,
    table: Tensor,
    rounds: int,
) -> tuple[Tensor, Tensor]:
    """The joint planner: int32 ``expert_G`` (G,) and ``assignments_RG``. Raises ValueError.

    ``prices``: of one assignment, far token, near token, far copy, near copy, plan. ``table``:
    int32 (rows, 5), the recipes of its candidates.
    """
    if table.ndim != 2 or table.shape[1] != 5 or table.dtype != torch.int32:
        raise ValueError(f"table must be int32 (rows, 5), got {table.dtype} {tuple(table.shape)}")
    table = table.contiguous()
    call = cpu_function("topoep_plan_joint", *[c_int64] * 9, c_void_p, c_int64, c_int64)
    prices = (token_bytes, expert_bytes, *prices)
    settings = (*prices, balance_weight, table.data_ptr(), len(table), rounds)
    return _plan(call, load_RE, main_E, replica_slots, ranks_per_node, settings)


_PLACE_ERRORS = {  # codes of csrc/placement/placement.cpp
    1: "sizes must satisfy: ranks divide experts (below 2**15), nodes divide ranks",
    2: "node_weight, balance_weight or effort is out of range",
    3: "sets must hold distinct experts from 0 to E-1 with weights of at least 0, fewer than 2**30 "
    "assignments in all",
    4: "load must be non-negative and below 2**31 in all",
    5: "out of memory",
}


def place(
    sets_UK: Tensor,
    weight_U: Tensor,
    load_E: Tensor,
    *,
    ranks: int,
    nodes: int,
    node_weight: int,
    balance_weight: int,
    effort: tuple[int, int, int],
    seed: int,
) -> Tensor:
    """Expert placement: int32 ``rank_E`` (E,). Raises ValueError.

    U distinct sets of K experts each (int32), tokens that chose them (int32), loads (int64).
    ``effort``: starting points, random swaps of one annealing, disturbances.
    """
    dtypes = (sets_UK.dtype, weight_U.dtype, load_E.dtype)
    if sets_UK.ndim != 2 or dtypes != (torch.int32, torch.int32, torch.int64):
        raise ValueError(f"place: sets (U, K) int32, weights int32, load int64; got {dtypes}")
    if weight_U.shape != (len(sets_UK),) or load_E.ndim != 1:
        raise ValueError(
            f"place: one weight a set and one load an expert, got {tuple(weight_U.shape)} and "
            f"{tuple(load_E.shape)} for {len(sets_UK)} sets"
        )
    sets_UK, weight_U, load_E = (t.contiguous() for t in (sets_UK, weight_U, load_E))
    rank_E = torch.empty(load_E.numel(), dtype=torch.int32)
    function = cpu_library().topoep_place
    function.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_void_p, *[c_int64] * 9, c_void_p]
    code = function(
        sets_UK.data_ptr(), weight_U.data_ptr(), *sets_UK.shape, load_E.data_ptr(),
        load_E.numel(), ranks, nodes, node_weight, balance_weight, *effort, seed,
        rank_E.data_ptr(),
    )  # fmt: skip
    if code:
        raise ValueError(f"place: {_PLACE_ERRORS[code]}")
    return rank_E


@cache
def cpu_function(name: str, *settings: type):
    """The C planner called ``name``; ``settings`` are the types between its sizes and outputs."""
    function = getattr(cpu_library(), name)
    function.restype = c_int
    function.argtypes = [c_void_p, c_int, c_void_p, *[c_int64] * 4, *settings, c_void_p, c_void_p]
    return function


def _plan(
    function, load_RE: Tensor, main_E: Tensor, replica_slots: int, per_node: int, settings: tuple
) -> tuple[Tensor, Tensor]:
    name = function.__name__
    if load_RE.ndim != 2 or load_RE.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name}: load_RE must be (R, E) of int32 or int64, got {tuple(load_RE.shape)} of "
            f"{load_RE.dtype}"
        )
    ranks, experts = load_RE.shape
    if main_E.shape != (experts,) or replica_slots < 0:
        raise ValueError(
            f"{name}: main_E must be ({experts},) and replica_slots at least 0, got "
            f"{tuple(main_E.shape)} and {replica_slots}"
        )
    if load_RE.device.type != "cpu" or main_E.device.type != "cpu":
        raise ValueError(f"{name} plans on the CPU; load_RE is on {load_RE.device}")
    load_RE = load_RE.contiguous()
    main_E = main_E.to(torch.int32).contiguous()
    slots = experts + ranks * replica_slots
    expert_G = torch.empty(slots, dtype=torch.int32)
    assignments_RG = torch.empty(ranks, slots, dtype=torch.int32)
    code = function(
        load_RE.data_ptr(), load_RE.dtype == torch.int64, main_E.data_ptr(),
        ranks, experts, replica_slots, per_node, *settings,
        expert_G.data_ptr(), assignments_RG.data_ptr(),
    )  # fmt: skip
    if code:
        raise ValueError(f"{name}: {_ERRORS[code]}")
    return expert_G, assignments_RG


def pick_slots(
    ids_TK: Tensor,
    expert_G: Tensor,
    count_G: Tensor,
    *,
    rank: int,
    ranks: int,
    ranks_per_node: int,
    experts: int,
    relayed: bool,
    token_far: int,
    token_near: int,
) -> Tensor:
    """int16 (T, K): the slots that source ``rank`` uses, ``count_G`` of each. Raises ValueError.

    ``relayed``: rows cross nodes over a relay. int32 ``expert_G`` and ``count_G``.
    """
    slots = expert_G.numel()
    if count_G.shape != expert_G.shape or {expert_G.dtype, count_G.dtype} != {torch.int32}:
        raise ValueError(
            f"expert_G and count_G must be int32 of one shape, got {expert_G.dtype} "
            f"{tuple(expert_G.shape)} and {count_G.dtype} {tuple(count_G.shape)}"
        )
    if any(tensor.device.type != "cpu" for tensor in (ids_TK, expert_G, count_G)):
        raise ValueError("topoep_pick_slots picks on the CPU; copy its inputs there")
    call = cpu_library().topoep_pick_slots
    call.restype = c_int
    call.argtypes = [
        c_void_p, c_int64, c_int64, c_void_p, c_void_p, *[c_int64] * 5, c_int, c_int64, c_int64,
        c_void_p,
    ]  # fmt: skip
    ids_TK = ids_TK.to(torch.int64).contiguous()
    expert_G, count_G = expert_G.contiguous(), count_G.contiguous()
    slot_TK = torch.empty(ids_TK.shape, dtype=torch.int16)
    code = call(
        ids_TK.data_ptr(), *ids_TK.shape, expert_G.data_ptr(), count_G.data_ptr(),
        ranks, ranks_per_node, slots // ranks, experts, rank, relayed, token_far, token_near,
        slot_TK.data_ptr(),
    )  # fmt: skip
    if code:
        raise ValueError(f"topoep_pick_slots: {_ERRORS[code]}")
    return slot_TK
