"""Expert coupling on recorded routing: how much structure a trained router has, and when.

    python -m recipes.coupling_trace RUN/trace --steps 50 100 200 --ranks 4 8 [--out results/x.json]

Placements are fitted on the routing around each step and judged on the last steps of the trace, so
that a row says what a placement of step N is worth at the end (Expert Coupling, section "They Also
Emerge Early and Stay Stable"). Predictors of token shuffling likewise. Nothing is timed.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.coupling import markdown
from topoep_titan.errors import InputError
from topoep_titan.placement import place, placement_quality
from topoep_titan.placement.shuffle import fit_predictor, shuffled
from topoep_titan.placement.statistics import coselection, pearson
from topoep_titan.planning.plan import contiguous_mains
from topoep_titan.results import provenance, write_atomically

WINDOW = 8  # recorded steps that one sample is drawn from
SAMPLE = 8192  # tokens of it, spread evenly: many documents
HISTORY = 3
BALANCE, NODE_WEIGHT = 50, 4  # per cent; bw_near / bw_far of h800_4x8


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, nargs="+", required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    files = {int(f.stem.split("-")[1]): f for f in sorted(options.trace.glob("step-*.npz"))}
    if len(files) < 2 * WINDOW:
        raise InputError(f"{options.trace} holds {len(files)} steps; record at least {2 * WINDOW}")
    last = max(files)
    end_LTK = window(files, last)
    experts = int(end_LTK.max()) + 1
    tables: dict[str, list] = {"placement": [], "token shuffling": []}
    for ranks in options.ranks:
        for step in [s for s in options.steps if s <= last - WINDOW] + [last - WINDOW]:
            then_LTK = window(files, step)
            tables["placement"].append(placement_row(then_LTK, end_LTK, experts, ranks, step, last))
            tables["token shuffling"].append(
                shuffle_row(then_LTK, end_LTK, experts, ranks, step, last)
            )
    result = {"kind": "counted on recorded routing", "tables": tables, **provenance()}
    write_atomically(options.out, json.dumps(result, indent=1) + "\n")
    title = "# Expert coupling on recorded routing"
    write_atomically(options.out.with_suffix(".md"), markdown(title, __doc__, tables))
    print(markdown(title, __doc__, tables))
    return 0


def window(files: dict[int, Path], step: int) -> Tensor:
    """int16 (L, T, K): SAMPLE tokens, evenly from the WINDOW recorded steps up to ``step``."""
    steps = [s for s in sorted(files) if s <= step][-WINDOW:]
    loaded = [np.load(files[s])["ids"] for s in steps]
    ids = np.concatenate([part.reshape(len(part), -1, part.shape[-1]) for part in loaded], axis=1)
    taken = np.linspace(0, ids.shape[1] - 1, min(SAMPLE, ids.shape[1])).astype(int)
    return torch.from_numpy(ids[:, taken])


def placement_row(
    then_LTK: Tensor, end_LTK: Tensor, experts: int, ranks: int, step: int, last: int
) -> dict:
    removed, correlation = [], []
    for then_TK, end_TK in zip(then_LTK, end_LTK):
        mains = (contiguous_mains(ranks, experts), solve(then_TK, experts, ranks))
        qualities = [placement_quality(end_TK, m, ranks=ranks, ranks_per_node=ranks) for m in mains]
        removed.append([q.rows_removed for q in qualities])
        pairs = (coselection(ids_TK, experts) for ids_TK in (then_TK, end_TK))
        correlation.append(pearson(*pairs))
    before, after = np.mean(removed, axis=0)
    return {
        "ranks": ranks,
        "fitted up to step": step,
        f"rows removed at step {last}": float(after),
        "by dedup alone": float(before),
        "Pearson of co-selection": float(np.mean(correlation)),
    }


def shuffle_row(
    then_LTK: Tensor, end_LTK: Tensor, experts: int, ranks: int, step: int, last: int
) -> dict:
    """Means over the layers that have a layer before them."""
    tokens = end_LTK.shape[1] // ranks * ranks
    locality, remote = [], []
    for layer in range(1, len(end_LTK)):
        main_E = solve(then_LTK[layer], experts, ranks)
        first = max(0, layer - HISTORY)
        then, end = ([*ids_LTK[first:layer].flip(0)] for ids_LTK in (then_LTK, end_LTK))
        predictor = fit_predictor(then, then_LTK[layer], main_E, ranks=ranks)
        rank_T = shuffled(predictor.scores([ids[:tokens] for ids in end]), tokens)
        quality = placement_quality(
            end_LTK[layer, :tokens], main_E, ranks=ranks, ranks_per_node=ranks, source_T=rank_T
        )
        locality.append(quality.locality)
        remote.append(quality.remote_rows)
    top_k = end_LTK.shape[2]
    return {
        "ranks": ranks,
        "fitted up to step": step,
        f"locality at step {last}": float(np.mean(locality)),
        "without": 1 / ranks,
        "remote rows a token": float(np.mean(remote)),
        "a row an assignment": top_k * (1 - 1 / ranks),
    }


def solve(ids_TK: Tensor, experts: int, ranks: int) -> Tensor:
    return place(
        ids_TK, experts=experts, ranks=ranks, ranks_per_node=ranks, node_weight=NODE_WEIGHT,
        balance_weight=BALANCE,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
