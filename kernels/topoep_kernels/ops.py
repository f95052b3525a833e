"""One Python function for each compiled function: tensors in, tensors out, errors raised.

Letters: R ranks, E experts, S replica slots a rank, G = E + R*S slots. Costs are integer
picoseconds, byte counts plain integers; what they mean is the caller's business.
"""

import ctypes
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from topoep_kernels.library import cpu_library

# codes of csrc/planner/planner.cpp
_ERRORS = {
    1: "sizes must satisfy: ranks divide experts, ranks_per_node divides ranks, "
    "ranks * slots below 2**31",
    2: "main_E must put exactly E/R experts on every rank",
    3: "load_RE holds a negative count",
    4: "load_RE holds more than 2**31 - 1 assignments",
    5: "unit costs times assignments exceed 2**62 picoseconds",
    6: "out of memory",
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
    """TopoEP as published: int32 ``(expert_G, assignments_RG)``. Raises ValueError."""
    return _plan(
        "topoep_plan_topoep",
        load_RE,
        main_E,
        replica_slots,
        ranks_per_node,
        (token_bytes, expert_bytes, token_far, token_near),
    )


def _plan(
    name: str, load_RE: Tensor, main_E: Tensor, replica_slots: int, per_node: int, settings: tuple
) -> tuple[Tensor, Tensor]:
    if load_RE.ndim != 2 or load_RE.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"load_RE must be int32 or int64 (R, E), got {load_RE.dtype}")
    ranks, experts = load_RE.shape
    if main_E.shape != (experts,):
        raise ValueError(f"main_E must be ({experts},), got {tuple(main_E.shape)}")
    if load_RE.is_cuda or main_E.is_cuda:
        raise ValueError(f"{name} plans on the CPU; move load_RE and main_E there")
    load_RE = load_RE.contiguous()
    main_E = main_E.to(torch.int32).contiguous()
    slots = experts + ranks * replica_slots
    expert_G = torch.empty(slots, dtype=torch.int32)
    assignments_RG = torch.empty(ranks, slots, dtype=torch.int32)
    code = _function(name, len(settings))(
        load_RE.data_ptr(), load_RE.dtype == torch.int64, main_E.data_ptr(),
        ranks, experts, replica_slots, per_node, *settings,
        expert_G.data_ptr(), assignments_RG.data_ptr(),
    )  # fmt: skip
    if code:
        raise ValueError(f"{name}: {_ERRORS[code]}")
    return expert_G, assignments_RG


_functions: dict[str, ctypes._CFuncPtr] = {}


def _function(name: str, settings: int) -> ctypes._CFuncPtr:
    if name not in _functions:
        function = getattr(cpu_library(), name)
        function.restype = c_int
        function.argtypes = (
            [c_void_p, c_int, c_void_p] + [c_int64] * (4 + settings) + [c_void_p, c_void_p]
        )
        _functions[name] = function
    return _functions[name]
