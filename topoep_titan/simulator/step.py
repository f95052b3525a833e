"""MoE layers and the dense parts around them -> one simulated training step.

A microbatch runs all its layers forward, the head, then backward. With P pipeline stages and N
microbatches a step takes N + P - 1 turns of the slowest stage (GPipe or 1F1B without interleaving),
of which P - 1 are the bubble; stages hold equal shares of the layers in order.

Letters: R ranks of the expert-parallel group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from topoep_titan.cluster import Cluster
from topoep_titan.simulator.layer import Backend, LayerCosts, backward_tasks, forward_tasks
from topoep_titan.simulator.models import Model
from topoep_titan.simulator.timeline import Task, finish, run

BACKWARD = 2.0  # a dense part's backward over its forward, in FLOPs


@dataclass(frozen=True)
class Step:
    """Seconds. ``moe``: what the step would lose if its MoE layers took no time. ``bubble``: how
    long the slowest stage waits for the others."""

    total: float
    moe: float
    dense: float
    bubble: float


def simulate_step(
    layers: Sequence[LayerCosts],
    *,
    model: Model,
    cluster: Cluster,
    backend: Backend,
    tokens: int,
    microbatches: int = 1,
    rest: float = 0.0,
    overlap: bool = True,
) -> Step:
    """``tokens`` of a rank and microbatch; ``rest``: seconds of a step that no FLOP explains."""
    stages = _split(layers, model.pipeline)
    with_moe, dense = [], []
    for index, stage in enumerate(stages):
        last = index == len(stages) - 1
        extra = _extra(model, cluster, tokens, first=index == 0, last=last)
        attention = model.attention_flops(tokens) / cluster.flops
        with_moe.append(finish(run(stage_tasks(stage, backend, attention, extra, overlap))))
        dense.append((1 + BACKWARD) * (len(stage) * attention + extra))
    turns = microbatches + model.pipeline - 1
    slowest = int(np.argmax(with_moe))
    total = _turns(with_moe, microbatches) + rest
    return Step(
        total=total,
        moe=total - rest - _turns(dense, microbatches),
        dense=dense[slowest] * turns,
        bubble=total - rest - microbatches * with_moe[slowest],
    )


def stage_tasks(
    layers: Sequence[LayerCosts],
    backend: Backend,
    attention: float,
    extra: float = 0.0,
    overlap: bool = True,
) -> list[Task]:
    """Forward, then backward, of one stage and microbatch. Without overlap: all on one stream."""
    if not layers:
        return [Task("extra", "compute", np.full(1, extra * (1 + BACKWARD)))]
    everywhere = np.zeros_like(layers[0].expert_R)
    tasks, ready = [Task("extra", "compute", everywhere + extra)], ()
    for index, costs in enumerate(layers):
        name = f"forward{index}"
        tasks.append(Task(f"{name}.attention", "compute", everywhere + attention, ready))
        tasks += forward_tasks(name, costs, backend, f"{name}.attention")
        ready = tuple(f"{name}.combine{c}" for c in range(backend.chunks))
    tasks.append(Task("turn", "compute", everywhere + BACKWARD * extra, ready))
    above = "turn"
    for index, costs in reversed(list(enumerate(layers))):
        name = f"backward{index}"
        tasks += backward_tasks(name, costs, backend, above)
        above = f"{name}.attention"
        ready = tuple(f"{name}.combine{c}" for c in range(backend.chunks))
        tasks.append(Task(above, "compute", everywhere + BACKWARD * attention, ready))
    if overlap:
        return tasks
    return [Task(t.name, "one", t.seconds_R, t.after, t.collective) for t in tasks]


def _split(layers: Sequence[LayerCosts], stages: int) -> list[Sequence[LayerCosts]]:
    """Equal shares in order; the first stages take one more where they do not divide."""
    cuts = [round(i * len(layers) / stages + 1e-9) for i in range(stages + 1)]
    return [layers[a:b] for a, b in pairwise(cuts)]


def _extra(model: Model, cluster: Cluster, tokens: int, *, first: bool, last: bool) -> float:
    """Seconds of a stage's dense layers and head, forward."""
    flops = first * model.dense_layers * model.dense_layer_flops(tokens)
    return (flops + last * model.head_flops(tokens)) / cluster.flops


def _turns(stage_seconds: Sequence[float], microbatches: int) -> float:
    """One microbatch passes all stages; the others follow at the pace of the slowest."""
    return sum(stage_seconds) + (microbatches - 1) * max(stage_seconds)
