"""Counts in, Plan out: the planners, all pure functions with one signature.

``planner(load_RE, *, main_E, cluster, model_dims, replica_slots) -> Plan``. To add one, write it in
a file of its own and name it in ``PLANNERS``.
"""

from collections.abc import Callable

from torch import Tensor

from topoep_titan.cluster import Cluster, ModelDims
from topoep_titan.errors import InputError
from topoep_titan.planning.eplb import eplb, eplb_free
from topoep_titan.planning.fastermoe import fastermoe
from topoep_titan.planning.flexmoe import flexmoe, flexmoe_free
from topoep_titan.planning.moonep import moonep, moonep_free
from topoep_titan.planning.plan import Plan, check_load, check_plan, unbalanced_plan
from topoep_titan.planning.topoep import topoep
from topoep_titan.planning.ultraep import ultraep


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


PLANNERS: dict[str, Callable[..., Plan]] = {
    "none": none,
    "topoep": topoep,
    "eplb": eplb,
    "fastermoe": fastermoe,
    "flexmoe": flexmoe,
    "ultraep": ultraep,
    "moonep": moonep,
}
# As published, outside the contract (mains move, or more than S slots): for comparison only.
FREE_PLANNERS: dict[str, Callable[..., Plan]] = {
    "eplb-free": eplb_free,
    "flexmoe-free": flexmoe_free,
    "moonep-free": moonep_free,
}


def planner_named(name: str) -> Callable[..., Plan]:
    """The planner called ``name``. Raises InputError that lists the known ones."""
    if name not in PLANNERS:
        raise InputError(f"unknown planner {name!r}; choose one of: {', '.join(PLANNERS)}")
    return PLANNERS[name]


__all__ = ["FREE_PLANNERS", "PLANNERS", "Plan", "check_load", "check_plan", "planner_named"]
