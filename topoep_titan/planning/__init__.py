"""Counts in, Plan out: the planners, all pure functions with one signature.

``planner(load_RE, *, main_E, cluster, model_dims, replica_slots) -> Plan``. To add one, write it in
a file of its own and name it in ``REFERENCE``. Where a planner is compiled, ``PLANNERS`` holds the
compiled one; ``implementation`` tells which.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from topoep_kernels.library import is_built
from torch import Tensor

from topoep_titan.cluster import Cluster, ModelDims
from topoep_titan.errors import InputError
from topoep_titan.planning import native
from topoep_titan.planning.eplb import eplb, eplb_free
from topoep_titan.planning.fastermoe import fastermoe
from topoep_titan.planning.flexmoe import flexmoe, flexmoe_free
from topoep_titan.planning.joint import joint
from topoep_titan.planning.moonep import moonep, moonep_free
from topoep_titan.planning.on_device import device_planner
from topoep_titan.planning.plan import (
    DevicePlanner,
    Plan,
    RowPlanner,
    check_load,
    check_plan,
    unbalanced_plan,
)
from topoep_titan.planning.rows import finish_rows, propose_rows
from topoep_titan.planning.topoep import topoep
from topoep_titan.planning.ultraep import ultraep

CPU = torch.device("cpu")


def none(
    load_RE: Tensor,
    *,
    main_E: Tensor,
    cluster: Cluster,
    model_dims: ModelDims,
    replica_slots: int,
) -> Plan:
    """No balancing: every assignment runs on its expert's main instance."""
    return unbalanced_plan(load_RE, main_E, replica_slots)


REFERENCE: dict[str, Callable[..., Plan]] = {
    "none": none,
    "topoep": topoep,
    "joint": joint,
    "eplb": eplb,
    "fastermoe": fastermoe,
    "flexmoe": flexmoe,
    "ultraep": ultraep,
    "moonep": moonep,
}
NATIVE: dict[str, Callable[..., Plan]] = {"topoep": native.topoep, "joint": native.joint}
PLANNERS = REFERENCE | (NATIVE if is_built("cpu") else {})
# As published, outside the contract (mains move, or more than S slots): for comparison only.
FREE_PLANNERS: dict[str, Callable[..., Plan]] = {
    "eplb-free": eplb_free,
    "flexmoe-free": flexmoe_free,
    "moonep-free": moonep_free,
}


def implementation(name: str) -> Literal["reference", "native"]:
    """What ``PLANNERS[name]`` is: the Python specification or the compiled CPU planner."""
    return "native" if PLANNERS[name] is NATIVE.get(name) else "reference"


def planner_named(name: str) -> Callable[..., Plan]:
    """The planner called ``name``. Raises InputError that lists the known ones."""
    if name not in PLANNERS:
        raise InputError(f"unknown planner {name!r}; choose one of: {', '.join(PLANNERS)}")
    return PLANNERS[name]


def make_planner(
    name: str,
    dispatcher: str,
    *,
    main_E: Tensor,
    cluster: Cluster,
    model_dims: ModelDims,
    replica_slots: int,
    device: torch.device = CPU,
    **options,
) -> Callable[[Tensor], Plan] | RowPlanner | DevicePlanner:
    """The planner called ``name`` for one group: in rows for ``joint`` where the dispatcher
    deduplicates, else a function of the load, on a CUDA ``device`` if that can plan this shape.
    Raises InputError for an unknown name."""
    settings = {"main_E": main_E, "cluster": cluster, "model_dims": model_dims}
    planner = planner_named(name)
    if name != "joint" or dispatcher == "alltoall":
        settings["replica_slots"] = replica_slots
        on_device = device_planner(name, device, **settings, **options) if device != CPU else None
        return on_device or partial(planner, **settings, **options)
    settings["dispatcher"] = dispatcher
    return RowPlanner(
        propose=partial(propose_rows, replica_slots=replica_slots, **settings, **options),
        finish=partial(finish_rows, **settings),
    )


__all__ = [
    "FREE_PLANNERS",
    "NATIVE",
    "PLANNERS",
    "REFERENCE",
    "DevicePlanner",
    "Plan",
    "RowPlanner",
    "check_load",
    "check_plan",
    "device_planner",
    "implementation",
    "make_planner",
    "planner_named",
]
