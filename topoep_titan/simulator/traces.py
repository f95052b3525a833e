"""Routing to replay: synthetic draws, or the ids that a training run recorded.

Letters: L layers, R ranks, T tokens of a rank, K top-k, E experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from topoep_titan.errors import InputError
from topoep_titan.planning.coupled import check_draw, coupled, coupling_for
from topoep_titan.planning.recorded import read_step, step_files
from topoep_titan.planning.workloads import load_of, skew, zipf


@dataclass(frozen=True)
class Microbatch:
    """One microbatch of every MoE layer: int16 (R, T, K) ids and int64 (R, E) load a layer."""

    ids_LRTK: list[Tensor]
    load_LRE: list[Tensor]
    ranks_per_node: int | None = None  # of the recording run, where it is known

    @property
    def tokens(self) -> int:
        return self.ids_LRTK[0].shape[1]


def synthetic(
    kind: str,
    *,
    layers: int,
    experts: int,
    top_k: int,
    ranks: int,
    tokens: int,
    seed: int,
    router_skew: float = -4.0,
) -> Microbatch:
    """``layers`` draws of ``skew`` or ``zipf`` (layer l from seed + l), or of ``coupled`` layers.

    Raises InputError for an unknown kind and for shapes that cannot be drawn.
    """
    check_draw(layers, ranks * tokens, experts)
    shape = experts, top_k, ranks, tokens
    if kind == "skew":
        ids = [skew(*shape, router_skew=router_skew, seed=seed + i) for i in range(layers)]
    elif kind == "zipf":
        ids = [zipf(*shape, seed=seed + i) for i in range(layers)]
    elif kind == "coupled":
        drawn = coupled(
            coupling_for(experts, top_k), layers=layers, tokens=ranks * tokens, seed=seed
        )
        ids = list(drawn.view(layers, ranks, tokens, top_k))
    else:
        raise InputError(f"workload {kind!r} is unknown; choose one of: skew, zipf, coupled")
    return Microbatch(ids, [load_of(layer, experts) for layer in ids])


def recorded(trace: Path, experts: int) -> Iterator[Microbatch]:
    """The microbatches of ``trace/step-*.npz`` in order, as a training run with
    ``[topoep] record_trace`` wrote them.

    Raises InputError for a folder without a trace, a file that is none, ids of other experts, and
    steps of different runs.
    """
    shape = None
    for path in step_files(trace):
        step = read_step(path)
        ids_LRTK, highest = step.ids_LRTK, int(step.ids_LRTK.max())
        if highest >= experts:
            raise InputError(f"{path} holds ids up to {highest}; expected ids below {experts}")
        if experts % ids_LRTK.shape[1]:
            raise InputError(f"{path}: {ids_LRTK.shape[1]} ranks do not divide {experts} experts")
        group = ids_LRTK.shape[1], step.ranks_per_node
        shape = shape or group
        if group != shape:
            raise InputError(
                f"{path}: ranks and ranks per node are {group}, {shape} in the first step; "
                "replay the steps of one run"
            )
        start = 0
        for tokens in step.microbatch_tokens:
            part = torch.from_numpy(ids_LRTK[:, :, start : start + tokens].astype("int16"))
            load_LRE = [load_of(layer, experts) for layer in part]
            yield Microbatch(list(part), load_LRE, step.ranks_per_node)
            start += tokens
