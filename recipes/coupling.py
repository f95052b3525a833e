"""What expert coupling saves on the coupled presets, beside the Expert Coupling text's figures.

    python -m recipes.coupling [--out results/coupling.json]

Routing is drawn (planning/coupled.py), nothing is trained and nothing is sent: rows are counted.
Placements are fitted on tokens of one seed and judged on 65,536 tokens of another of the same
router. Writes the JSON and, beside it, the same tables as .md. Letters: K top-k, D width.
"""

import argparse
import json
import statistics
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from topoep_titan.placement import BALANCE_WEIGHT, placement_quality
from topoep_titan.placement.native import place
from topoep_titan.placement.shuffle import fit_predictor, shuffled
from topoep_titan.placement.statistics import coselection, pearson
from topoep_titan.planning.coupled import PRESETS, Coupling, coupled, coupling_for
from topoep_titan.planning.plan import contiguous_mains
from topoep_titan.results import provenance, write_atomically

WORKLOADS = {
    "top2": PRESETS["top2"],
    "top6": PRESETS["top6"],
    "top8": PRESETS["top8"],
    "top2 hard": coupling_for(128, 2, hard=True),
    "top6 hard": coupling_for(128, 6, hard=True),
    "top8 hard": coupling_for(128, 8, hard=True),
}
TEXT_REMOVED = {"top2": (0.06, 0.26), "top6": (0.25, 0.58)}  # dedup alone, with placement, at EP8
TEXT_LOCALITY = {("top2", 8): 0.59, ("top2", 16): 0.53, ("top6", 8): 0.57, ("top6", 16): 0.46}
FIT_SEED, TEST_SEED = 0, 1
SAMPLE, TEST = 8192, 65_536  # tokens
SAMPLES = (256, 512, 1024, 4096, 8192, 262_144)
REPEATS = 3  # disjoint samples of each size, their figures averaged
NODE_WEIGHT = 4  # bw_near / bw_far of h800_4x8
LAYERS = 4  # the last one is foretold from the three before it
BLOCK = 8192  # tokens of one TP group and microbatch
HIDDEN = 2048  # D, assumed: the text gives no width. Only bytes depend on it
METADATA = 12  # bytes of an assignment beside its row: (row, slot, score), 4 each


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results/coupling.json"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tables = {}
    for name, rows in (
        ("rows removed at EP8", removed_rows),
        ("sample size at EP8", sample_rows),
        ("solver", solver_rows),
        ("node rows on 4 x 8 ranks", node_rows),
        ("token shuffling, TP = EP", shuffle_rows),
    ):
        tables[name] = []
        for row in rows():
            tables[name].append(row)
            print(json.dumps(row), flush=True)
    seeds = {"fit": FIT_SEED, "test": TEST_SEED, "world": 1, "solver": 0}
    result = {"kind": "counted on drawn routing", "seeds": seeds, "tables": tables, **provenance()}
    write_atomically(options.out, json.dumps(result, indent=1) + "\n")
    page = markdown("# Expert coupling on drawn routing", __doc__, tables)
    write_atomically(options.out.with_suffix(".md"), page)
    print(f"coupling: {options.out} and {options.out.with_suffix('.md')}")
    return 0


# --- tables


def removed_rows():
    for name, coupling in WORKLOADS.items():
        test_TK = drawn(coupling, TEST, TEST_SEED)[-1]
        placed_E = placed(coupling, 8, 8)
        text = TEXT_REMOVED.get(name, (None, None))
        before = placement_quality(
            test_TK, contiguous_mains(8, coupling.experts), ranks=8, ranks_per_node=8
        )
        after = placement_quality(test_TK, placed_E, ranks=8, ranks_per_node=8)
        yield {
            "workload": name,
            "dedup alone": before.rows_removed,
            "dedup alone, text": text[0],
            "with placement": after.rows_removed,
            "with placement, text": text[1],
            "rank load max/mean before": before.load_max_over_mean,
            "after": after.load_max_over_mean,
        }


def sample_rows():
    for name in ("top2", "top6"):
        coupling = WORKLOADS[name]
        pool_TK = coupled(coupling, layers=1, tokens=max(SAMPLES), seed=FIT_SEED)[0]
        test_TK = drawn(coupling, TEST, TEST_SEED)[-1]
        whole_EE = coselection(pool_TK, coupling.experts)
        contiguous = placement_quality(
            test_TK, contiguous_mains(8, coupling.experts), ranks=8, ranks_per_node=8
        ).rows_removed
        found = {}
        for size in SAMPLES:
            samples = pool_TK.split(size)[:REPEATS]
            removed = [
                placement_quality(
                    test_TK, solve(sample, coupling, 8, 8), ranks=8, ranks_per_node=8
                ).rows_removed
                for sample in samples
            ]
            correlation = [pearson(coselection(s, coupling.experts), whole_EE) for s in samples]
            found[size] = statistics.fmean(removed), statistics.fmean(correlation)
        most, _ = found[max(SAMPLES)]
        for size, (removed, correlation) in found.items():
            yield {
                "workload": name,
                "sampled tokens": size,
                "rows removed": removed,
                "share of the gain": (removed - contiguous) / (most - contiguous),
                "points below the largest": 100 * (most - removed),
                "Pearson": correlation,
            }


def solver_rows():
    shapes = [(128, 2, 8, 8), (128, 6, 32, 8), (128, 8, 32, 8), (256, 8, 64, 8), (640, 8, 32, 8)]
    for experts, top_k, ranks, per_node in shapes:
        for hard in (False, True):
            coupling = coupling_for(experts, top_k, hard=hard)
            fit_TK = drawn(coupling, SAMPLE, FIT_SEED)[-1]
            started = time.process_time()
            main_E = solve(fit_TK, coupling, ranks, per_node)
            seconds = time.process_time() - started
            test_TK = drawn(coupling, 32_768, TEST_SEED)[-1]
            after, before = (
                placement_quality(test_TK, each_E, ranks=ranks, ranks_per_node=per_node)
                for each_E in (main_E, contiguous_mains(ranks, experts))
            )
            yield {
                "E": experts, "K": top_k, "hard": hard, "ranks": ranks, "a node": per_node,
                "rows before": before.rows, "rows": after.rows, "nodes before": before.nodes,
                "nodes": after.nodes, "load max/mean": after.load_max_over_mean,
                "solver CPU seconds": seconds,
            }  # fmt: skip


def node_rows():
    for name in ("top8", "top8 hard", "top6"):
        coupling = WORKLOADS[name]
        test_TK = drawn(coupling, TEST, TEST_SEED)[-1]
        for how, main_E in (
            ("contiguous", contiguous_mains(32, coupling.experts)),
            ("ranks alone", placed(coupling, 32, 32)),
            ("nodes first", placed(coupling, 32, 8)),
        ):
            quality = placement_quality(test_TK, main_E, ranks=32, ranks_per_node=8)
            if how == "contiguous":
                base = quality.far_rows
            yield {
                "workload": name,
                "placement": how,
                "rows across nodes a token": quality.far_rows,
                "fewer than contiguous": 1 - quality.far_rows / base,
                "rows a token": quality.rows,
            }


def shuffle_rows():
    for name in ("top2", "top6"):
        coupling = WORKLOADS[name]
        for ranks in (8, 16):
            yield from _shuffle_rows(name, coupling, ranks)


def _shuffle_rows(name: str, coupling: Coupling, ranks: int):
    fit_LTK, test_LTK = (
        drawn(coupling, tokens, seed, LAYERS)
        for tokens, seed in ((16_384, FIT_SEED), (TEST, TEST_SEED))
    )
    source_T = torch.arange(BLOCK).repeat(TEST // BLOCK) * ranks // BLOCK  # sequence shards
    main_E = solve(fit_LTK[-1][:SAMPLE], coupling, ranks, 8)
    before_E = solve(fit_LTK[-2][:SAMPLE], coupling, ranks, 8)
    last_T = foretold(fit_LTK[:-1], test_LTK[:-1], before_E, ranks)
    rank_T = foretold(fit_LTK, test_LTK, main_E, ranks)
    stay_RR = torch.zeros(ranks, ranks).index_put_(
        (last_T, rank_T), torch.ones(()), accumulate=True
    )
    rows, columns = linear_sum_assignment(-stay_RR.numpy())
    moved = 1 - float(stay_RR[rows, columns].sum() / TEST)
    contiguous_E = contiguous_mains(ranks, coupling.experts)
    top_k = coupling.top_k
    for how, each_E, each_T in (
        ("baseline: a row an assignment", None, source_T),
        ("dedup", contiguous_E, source_T),
        ("dedup + placement", main_E, source_T),
        ("dedup + placement + shuffle", main_E, rank_T),
    ):
        quality = placement_quality(
            test_LTK[-1],
            contiguous_E if each_E is None else each_E,
            ranks=ranks,
            ranks_per_node=8,
            source_T=each_T,
        )
        remote = top_k * (1 - quality.locality)  # assignments
        remote_rows = remote if each_E is None else quality.remote_rows
        metadata = remote * (4 if each_E is None else METADATA)
        yield {
            "workload": name,
            "EP": ranks,
            "configuration": how,
            "locality": quality.locality,
            "locality, text": TEXT_LOCALITY[name, ranks] if each_T is rank_T else None,
            "remote rows a token": remote_rows,
            "dispatch bytes a token": remote_rows * 2 * HIDDEN + metadata,
            "residual exchange, bytes a token": moved * 2 * HIDDEN if each_T is rank_T else 0.0,
            "rank rows max/mean": quality.rows_max_over_mean,
        }


# --- parts


def foretold(fit_LTK: Tensor, test_LTK: Tensor, main_E: Tensor, ranks: int) -> Tensor:
    """int64 (T,): the rank that each token is dealt to before the last of these layers."""
    fit, test = ([*ids_LTK[:-1].flip(0)][:3] for ids_LTK in (fit_LTK, test_LTK))
    predictor = fit_predictor(fit, fit_LTK[-1], main_E, ranks=ranks)
    return shuffled(predictor.scores(test), BLOCK)


@cache
def drawn(coupling: Coupling, tokens: int, seed: int, layers: int = 1) -> Tensor:
    return coupled(coupling, layers=layers, tokens=tokens, seed=seed)


@cache
def placed(coupling: Coupling, ranks: int, per_node: int) -> Tensor:
    return solve(drawn(coupling, SAMPLE, FIT_SEED)[-1], coupling, ranks, per_node)


def solve(ids_TK: Tensor, coupling: Coupling, ranks: int, per_node: int) -> Tensor:
    return place(
        ids_TK, experts=coupling.experts, ranks=ranks, ranks_per_node=min(per_node, ranks),
        node_weight=NODE_WEIGHT, balance_weight=BALANCE_WEIGHT,
    )  # fmt: skip


def markdown(title: str, about: str, tables: dict[str, list[dict[str, Any]]]) -> str:
    """The tables of one result, under the last paragraph of the program's docstring."""
    lines = [title, "", about.strip().split("\n\n")[2], ""]
    for name, rows in tables.items():
        lines += [f"## {name}", "", "| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|"]
        lines += ["| " + " | ".join(map(_cell, row.values())) + " |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
