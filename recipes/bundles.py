"""Do replicas pay by the rows they save, once experts are placed? Counted on the coupled presets.

    python -m recipes.bundles [--out results/bundles.json]

A row to a node disappears only when all experts that its token has there have replicas at home, so
replicas must come as bundles. For one node of 8 ranks the best bundle of 8 experts (a far copy onto
each rank) and of 16 is sought: by adding the expert that completes most rows, and by taking away,
from all of them, the one that completes fewest; the better counts. Beside it, the rows that those
copies cost on a far port under the cost model. Nothing is trained, sent or timed.

Letters: N rows (a token and another node it visits), E experts.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

from recipes.coupled_planning import (
    EXPERTS,
    FIT_SEEDS,
    FIT_TOKENS,
    NODE_WEIGHT,
    TOKENS,
    WORKLOADS,
)
from topoep_titan.cluster import ModelDims, load_cluster
from topoep_titan.cluster.cost_model import unit_costs
from topoep_titan.placement import BALANCE_WEIGHT, place
from topoep_titan.planning.coupled import coupled
from topoep_titan.planning.plan import contiguous_mains
from topoep_titan.results import provenance, write_atomically

RANKS, PER_NODE, SIZES = 32, 8, (8, 16)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/bundles.json"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    costs = unit_costs(load_cluster("h800_4x8"), ModelDims(2048, 768))
    break_even = -(-costs.copy_far // costs.token_far)
    table = []
    for preset, workload in WORKLOADS.items():
        ids_TK = coupled(workload, layers=1, tokens=PER_NODE * TOKENS, seed=options.seed)[0]
        fit_TK = coupled(workload, layers=1, tokens=FIT_TOKENS, seed=options.seed + FIT_SEEDS)[0]
        placed_E = place(
            fit_TK, experts=EXPERTS, ranks=RANKS, ranks_per_node=PER_NODE,
            node_weight=NODE_WEIGHT, balance_weight=BALANCE_WEIGHT,
        )  # fmt: skip
        for placement, main_E in (
            ("contiguous", contiguous_mains(RANKS, EXPERTS)),
            ("placed", placed_E),
        ):
            needs_NE = far_rows(ids_TK.numpy().astype(int), main_E.numpy() // PER_NODE)
            saved = saved_by_bundles(needs_NE, SIZES)
            row = {"preset": preset, "placement": placement, "rows": len(needs_NE) / PER_NODE}
            for size in SIZES:
                row[f"saved_by_{size}"] = saved[size] / PER_NODE
                row[f"cost_of_{size}"] = size // PER_NODE * break_even
            table.append(row)
            print(json.dumps(row), flush=True)
    result = {
        "kind": "counted on drawn routing, rows of one rank", "seed": options.seed,
        "model": "qwen3 4x8", "rates": "h800_4x8", "rows": table, **provenance(),
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.out, json.dumps(result, indent=1) + "\n")
    print(f"numbers: {options.out}")
    return 0


def far_rows(ids_TK: np.ndarray, node_E: np.ndarray) -> np.ndarray:
    """bool (N, E): the experts of each row that leaves node 0."""
    rows = []
    for node in range(1, node_E.max() + 1):
        needs_TE = np.zeros((len(ids_TK), len(node_E)), dtype=bool)
        token, k = np.nonzero(node_E[ids_TK] == node)
        needs_TE[token, ids_TK[token, k]] = True
        rows.append(needs_TE[needs_TE.any(1)])
    return np.concatenate(rows)


def saved_by_bundles(needs_NE: np.ndarray, sizes: tuple[int, ...]) -> dict[int, int]:
    """Rows all of whose experts are in the best bundle found, for each size."""
    added, taken = _by_adding(needs_NE, max(sizes)), _by_taking_away(needs_NE)
    return {size: max(added[size], taken[size]) for size in sizes}


def _by_adding(needs_NE: np.ndarray, most: int) -> list[int]:
    """Rows saved by 0 to ``most`` experts; where none completes a row, the most wanted is added."""
    missing_N, wanted_E = needs_NE.sum(1), needs_NE.sum(0)
    saved = [0]
    for _ in range(most):
        completed_E = needs_NE[missing_N == 1].sum(0)
        expert = int(np.lexsort((-wanted_E, -completed_E))[0])
        missing_N = missing_N - needs_NE[:, expert]
        needs_NE = needs_NE.copy()
        needs_NE[:, expert] = False
        wanted_E = needs_NE.sum(0)
        saved.append(int((missing_N == 0).sum()))
    return saved


def _by_taking_away(needs_NE: np.ndarray) -> list[int]:
    """Rows saved by 0 to E experts: from all, always the expert of the fewest saved rows leaves."""
    inside_E = np.ones(needs_NE.shape[1], dtype=bool)
    rows_NE = needs_NE
    saved = [0] * (len(inside_E) + 1)
    saved[-1] = len(rows_NE)
    for size in range(len(inside_E) - 1, -1, -1):
        wanted_E = rows_NE.sum(0)
        expert = int(np.where(inside_E, wanted_E, wanted_E.max() + 1).argmin())
        inside_E[expert] = False
        rows_NE = rows_NE[~rows_NE[:, expert]]
        saved[size] = len(rows_NE)
    return saved


if __name__ == "__main__":
    sys.exit(main())
