"""Reads the routing that training recorded: ``trace/step-*.npz``, one file a step.

Letters: L layers, R ranks, T tokens of a rank, K top-k, E experts.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from topoep_titan.errors import InputError
from topoep_titan.files import read_archive

REMEDY = "train with topoep.record_trace = true and give outputs/NAME/trace"
MOST_EXPERTS = 2**15  # ids are int16


@dataclass(frozen=True)
class RecordedStep:
    ids_LRTK: np.ndarray  # int16, each token's experts distinct
    microbatch_tokens: list[int]  # T by microbatch
    ranks_per_node: int | None  # None in traces that did not record it yet


def read_step(path: Path) -> RecordedStep:
    """Raises InputError for a file that is no trace, or whose arrays contradict each other."""
    found = read_archive(
        path,
        ("ids",),
        optional=("microbatch_tokens", "ranks_per_node"),
        of="a trace",
        remedy=REMEDY,
    )
    ids, per_node = found["ids"], found.get("ranks_per_node")
    cuts = found.get("microbatch_tokens", np.array(ids.shape[2:3]))
    check_routing(ids, path)
    if ids.ndim != 4:
        raise InputError(f"{path}: ids have shape {ids.shape}, not (layers, ranks, tokens, top-k)")
    if cuts.ndim != 1 or cuts.dtype.kind not in "iu" or (cuts < 1).any():
        raise InputError(f"{path}: microbatch_tokens must be counts of at least 1; got {cuts!r}")
    if int(cuts.sum()) != ids.shape[2]:
        raise InputError(
            f"{path}: the microbatches hold {int(cuts.sum())} tokens a rank, the ids "
            f"{ids.shape[2]}; record it again"
        )
    if per_node is not None:
        good = per_node.shape == () and per_node.dtype.kind in "iu" and per_node >= 1
        if not good or ids.shape[1] % int(per_node):
            raise InputError(f"{path}: {ids.shape[1]} ranks do not fill nodes of {per_node!r}")
        per_node = int(per_node)
    return RecordedStep(ids, cuts.tolist(), per_node)


def step_files(trace: Path) -> list[Path]:
    """The files of a trace/ folder in order, or the one file. Raises InputError for none."""
    paths = sorted(trace.glob("step-*.npz")) if trace.is_dir() else [trace]
    if not paths or not paths[0].exists():
        raise InputError(f"no trace in {trace} (step-*.npz); {REMEDY}")
    return paths


def check_routing(ids: np.ndarray, path: Path) -> None:
    """Raise InputError unless ``ids`` (..., T, K) are expert ids, distinct in each token."""
    if ids.dtype.kind not in "iu" or ids.ndim < 2 or not ids.size:
        raise InputError(
            f"{path} holds {ids.dtype} of shape {ids.shape}; expert ids are integers "
            "(..., tokens, top-k) of at least one token"
        )
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= MOST_EXPERTS:
        raise InputError(
            f"{path} holds expert ids from {lowest} to {highest}; "
            f"they go from 0 to at most {MOST_EXPERTS - 1}"
        )
    ordered = np.sort(ids.reshape(-1, ids.shape[-1]), axis=1)
    if (twice := (ordered[:, 1:] == ordered[:, :-1]).any(1)).any():
        token = ids.reshape(-1, ids.shape[-1])[int(twice.argmax())]
        raise InputError(f"{path}: a token chose an expert twice: {token.tolist()}")
