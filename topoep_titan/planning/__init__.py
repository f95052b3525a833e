"""Counts in, Plan out: the planners, all pure functions with one signature.

``planner(load_RE, *, main_E, cluster, model_dims, replica_slots) -> Plan``. To add one, write it in
a file of its own and name it in ``REFERENCE``. Where a planner is compiled, ``PLANNERS`` holds the
compiled one; ``implementation`` tells which.
"""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from topoep_titan.cluster import Cluster, ModelDims
from topoep_titan.errors import InputError
from topoep_titan.planning import native
from topoep_titan.planning.joint import joint
from topoep_titan.planning.plan import Plan, check_load, check_plan, unbalanced_plan
from topoep_titan.planning.topoep import topoep


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


REFERENCE: dict[str, Callable[..., Plan]] = {"none": none, "topoep": topoep, "joint": joint}
NATIVE: dict[str, Callable[..., Plan]] = {"topoep": native.topoep, "joint": native.joint}
PLANNERS = REFERENCE | (NATIVE if native.is_built() else {})


def implementation(name: str) -> Literal["reference", "native"]:
    """What ``PLANNERS[name]`` is: the Python specification or the compiled CPU planner."""
    return "native" if PLANNERS[name] is NATIVE.get(name) else "reference"


def planner_named(name: str) -> Callable[..., Plan]:
    """The planner called ``name``. Raises InputError that lists the known ones."""
    if name not in PLANNERS:
        raise InputError(f"unknown planner {name!r}; choose one of: {', '.join(PLANNERS)}")
    return PLANNERS[name]


__all__ = [
    "NATIVE",
    "PLANNERS",
    "REFERENCE",
    "Plan",
    "check_load",
    "check_plan",
    "implementation",
    "planner_named",
]
