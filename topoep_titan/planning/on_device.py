"""Planners whose load and plan lie in device memory: neither waits for the host.

Bit for bit the plans of the references. On CPU tensors they run in the SIMT machine, for tests.
"""

import dataclasses
from functools import partial

import torch
from topoep_kernels import planners
from topoep_kernels.library import is_built
from torch import Tensor

from topoep_titan.cluster import Cluster, ModelDims
from topoep_titan.cluster.cost_model import unit_costs
from topoep_titan.planning.joint import BALANCE_WEIGHT, ROUNDS, TABLE
from topoep_titan.planning.native import recipes
from topoep_titan.planning.plan import DevicePlanner, Plan

NAMES = ("topoep", "joint")


def device_planner(
    name: str,
    device: torch.device,
    *,
    main_E: Tensor,
    cluster: Cluster,
    model_dims: ModelDims,
    replica_slots: int,
    balance_weight: int = BALANCE_WEIGHT,
    rounds: int = ROUNDS,
) -> DevicePlanner | None:
    """The planner called ``name`` for one group, on ``device``.

    None where the host must plan: another planner, no compiled library for the device, or a shape
    that ``planners.takes_joint`` refuses (more than 96 ranks a node).
    """
    if name not in NAMES or not is_built(device.type):
        return None
    costs = unit_costs(cluster, model_dims)
    shape = {"replica_slots": replica_slots, "ranks_per_node": cluster.ranks_per_node}
    prices = {"token_bytes": model_dims.token_bytes, "expert_bytes": model_dims.expert_bytes}
    mains_E = planners.order_mains(main_E).to(device)
    if name == "topoep":
        prices |= {"token_far": costs.token_far, "token_near": costs.token_near}
        return DevicePlanner(partial(_plan, planners.plan_topoep, mains_E, **shape, **prices))
    sizes = {"ranks": cluster.ranks, "experts": len(main_E), "recipes": len(TABLE)}
    if not planners.takes_joint(device, **sizes, **shape):
        return None
    search = {
        "prices": dataclasses.astuple(costs), "balance_weight": balance_weight,
        "table": recipes(len(TABLE)), "rounds": rounds,
    }  # fmt: skip
    return DevicePlanner(partial(_plan, planners.plan_joint, mains_E, **shape, **prices, **search))


def _plan(planner, mains_E: Tensor, load_RE: Tensor, **settings) -> Plan:
    return Plan(*planner(load_RE.int(), mains_E, **settings))
