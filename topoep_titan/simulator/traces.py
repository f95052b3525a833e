"""Routing to replay: synthetic draws, or the ids that a training run recorded.

Letters: L layers, R ranks, T tokens of a rank, K top-k, E experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from topoep_titan.errors import InputError
from topoep_titan.planning.coupled import coupled, coupling_for
from topoep_titan.planning.workloads import load_of, skew, zipf


@dataclass(frozen=True)
class Microbatch:
    """One microbatch of every MoE layer: int16 (R, T, K) ids and int64 (R, E) load a layer."""

    ids_LRTK: list[Tensor]
    load_LRE: list[Tensor]

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


def recorded(folder: Path, experts: int) -> Iterator[Microbatch]:
    """The microbatches of ``folder/step-*.npz`` in order, as a training run with
    ``[topoep] record_trace`` wrote them (``ids`` int16 (L, R, T, K), ``microbatch_tokens``).

    Raises InputError for a folder without a trace, a file that is none, and ids of other experts.
    """
    paths = sorted(Path(folder).glob("step-*.npz"))
    if not paths:
        raise InputError(
            f"no trace in {folder} (step-*.npz); train with topoep.record_trace = true and give "
            "outputs/NAME/trace"
        )
    for path in paths:
        try:
            with np.load(path, allow_pickle=False) as file:
                ids, cuts = file["ids"], file["microbatch_tokens"]
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"{path} is not a trace ({error}); record it again") from None
        if ids.ndim != 4 or int(ids.max(initial=-1)) >= experts or int(ids.min(initial=0)) < 0:
            raise InputError(
                f"{path} holds ids of shape {ids.shape} from {ids.min(initial=0)} to "
                f"{ids.max(initial=0)}; expected (layers, ranks, tokens, top-k) below {experts}"
            )
        start = 0
        for tokens in cuts.tolist():
            part = torch.from_numpy(np.ascontiguousarray(ids[:, :, start : start + tokens]))
            yield Microbatch(list(part), [load_of(layer, experts) for layer in part])
            start += tokens
