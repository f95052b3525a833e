"""Write the tables of README.md, results/FINDINGS.md and recipes/README.md from committed results.

    python -m recipes.readme

A table stands between ``<!-- table NAME -->`` and ``<!-- end of table -->``; ``TABLES`` says how
each is made. Prose between tables is written by hand. A test holds the files to what this writes.
"""

import json
import re
import sys
from collections import defaultdict
from statistics import fmean, geometric_mean
from typing import Any

from recipes.common import FIGURES, MODELS, ROOT, TITLES, shown
from topoep_titan.reports.published import read_answers
from topoep_titan.results import write_atomically

FILES = tuple(ROOT / name for name in ("README.md", "results/FINDINGS.md", "recipes/README.md"))
TABLE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
SKEWS = (0.0, -0.5, -1.0, -2.0, -4.0)
# README's name of a cell of the planner bench: (experts, width, ranks).
CELLS = {
    "Qwen3-30B-A3B, EP 32 (4x8)": (128, 2048, 32),
    "GLM-4.5-Air, EP 16 (2x8)": (128, 4096, 16),
    "DeepSeek-V2, EP 16 (2x8)": (160, 5120, 16),
    "640 experts, EP 32 (4x8)": (640, 2048, 32),
    "Qwen3-30B-A3B, EP 8 (1x8)": (128, 2048, 8),
}


def main() -> int:
    for path in FILES:
        write_atomically(path, rendered(path.read_text()))
    return 0


def rendered(text: str) -> str:
    """``text`` with every table made anew. Raises KeyError for a table that nothing makes."""
    return TABLE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


def figures() -> str:
    """One row for each figure or table of the papers."""
    rows = []
    for answer in read_answers(FIGURES):
        # The first values that have both; the result file and the report hold all.
        both = [v for v in answer["values"] if v["published"] is not None and v["ours"] is not None]
        values = both[:3] or answer["values"][:2]
        published, ours = (
            "; ".join(f"{shown(v[key])} {v['unit']}".strip() for v in values)
            for key in ("published", "ours")
        )
        question = f"{answer['question']} ({answer['kind']})"
        minutes = f"{max(answer['seconds'] / 60, 0.1):.1f}"
        why = next((v["why"] for v in values if v["why"]), "")
        rows.append(
            [answer["figure"], question, f"`{answer['command']}`", minutes, published, ours, why]
        )
    heads = ["figure", "question", "command", "minutes", "published", "ours", "why they differ"]
    return markdown(heads, rows)


def loss() -> str:
    rows = []
    for run in read("reproduce_qwen")["runs"]:
        found, against = run["summary"], run["compared_with_none"]
        differs = against and (
            f"{percent(against['mean_difference'], 3)} ({percent(against['max_difference'], 2)})"
        )
        replicas = found["replica_served_fraction"]
        rows.append([f"`{run['planner']}`", f"{found['max_over_mean_before']:.2f}",
                     f"{found['max_over_mean']:.2f}", percent(found["inter_node_fraction"], 1),
                     percent(replicas, 1) if replicas else "0", differs or ""])  # fmt: skip
    heads = ["planner", "busiest / mean rank, before", "under the plan", "assignments across nodes",
             "served by replicas", "loss, mean (max) difference to `none`"]  # fmt: skip
    return markdown(heads, rows)


def planners() -> str:
    """joint over topoep, geometric mean of seeds; in brackets seed means, over none and the best
    other."""
    totals: dict[tuple, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in read("bench_planner")["rows"]:
        if row["workload"] == "skew" and not row["planner"].endswith("-free"):
            cell = row["experts"], row["hidden"], row["ranks"]
            totals[*cell, row["router_skew"]][row["planner"]].append(row["modelled_us"]["total"])
    rows = []
    for name, cell in CELLS.items():
        cells = []
        for router_skew in SKEWS:
            found = totals[*cell, router_skew]
            over_topoep = geometric_mean(a / b for a, b in zip(found["joint"], found["topoep"]))
            means = {planner: fmean(values) for planner, values in found.items()}
            joint = means.pop("joint")
            over_none, over_best = joint / means["none"], joint / min(means.values())
            cells.append(f"{over_topoep:.2f} ({over_none:.2f}, {over_best:.2f})")
        rows.append([name, *cells])
    return markdown(["", f"skew {SKEWS[0]:g}", *(f"{s:g}" for s in SKEWS[1:])], rows)


def planning_time() -> str:
    found: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    for row in read("bench_planner_time")["rows"]:
        found[row["planner"]][row["experts"], row["ranks"]] = row["plan_us"]
    rows = [
        [f"`{name}`", *(f"{us / 1e3:.1f} ms" if us >= 999.5 else f"{us:.0f} us"
                        for us in times.values())]
        for name, times in found.items()
    ]  # fmt: skip
    shapes = next(iter(found.values()))
    heads = [
        f"{experts} experts, {ranks} ranks" if index in (0, len(shapes) - 1) else f"{ranks}"
        for index, (experts, ranks) in enumerate(shapes)
    ]
    return markdown(["", *heads], rows)


def rows_planning() -> str:
    """Milliseconds by dedup-node on 4x8 ranks; topoep by the better dispatcher."""
    found = {
        (row["preset"], row["model"]): row
        for row in read("coupled_planning")["summary"]
        if row.get("dispatcher") == "dedup-node" and "preset" in row
    }
    rows = []
    for preset in ("top2", "top6", "top8", "top8 hard", "hot5", "hot8", "hot10"):
        row = found[preset, "qwen3 4x8"]
        us = row["us"]
        times = [us["none"], min(us["topoep"], us["topoep dedup"]), us["placed none"],
                 us["placed joint"], us["placed joint rows"]]  # fmt: skip
        ratios = row["over_better_part"], found[preset, "glm 2x8"]["over_better_part"]
        rows.append([preset, *(f"{t / 1e3:.2f}" for t in times), *(f"{r:.2f}" for r in ratios)])
    heads = ["", "contiguous, `none`", "contiguous, `topoep`", "placed, `none`",
             "placed, `joint` in assignments", "placed, `joint` in rows",
             "rows over the better part", "GLM-4.5-Air, 2x8"]  # fmt: skip
    return markdown(heads, rows)


def step() -> str:
    values = {v["what"]: v for v in read("figures/throughput_by_skew")["values"]}
    rows = []
    for title in (TITLES[name] for name in MODELS):
        both = [values[f"{title}: topoep over megatron at skew {at}"] for at in (-4, 0)]
        rows.append([title, *(f"{v[key]:.2f}" for v in both for key in ("published", "ours"))])
    heads = ["`topoep` over Megatron-LM, throughput", "published, skew -4", "simulated",
             "published, skew 0", "simulated"]  # fmt: skip
    return markdown(heads, rows)


def misses() -> str:
    values = {v["what"]: v for v in read("figures/throughput_by_skew")["values"]}
    parts = ("what unevenness costs megatron, skew -4 less skew 0, a layer",
             "what topoep costs itself, its skew -4 less megatron's skew 0, a layer")  # fmt: skip
    rows = []
    for title in (TITLES[name] for name in MODELS):
        both = [values[f"{title}: {part}"] for part in parts]
        rows.append([title, *(f"{v[key]:.1f} ms" for v in both for key in ("published", "ours"))])
    heads = ["a MoE layer and step", "unevenness under `megatron`, published", "ours",
             "`topoep`'s own cost, published", "ours"]  # fmt: skip
    return markdown(heads, rows)


def balance() -> str:
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for row in read("balance")["rows"]:
        both = row["max_over_mean"], row["max_over_mean_worst_layer"]
        found[row["recipe"]][row["balance"]] = "{:.2f} ({:.2f})".format(*both)
    names = {
        "qwen3_debug": "Qwen3",
        "glm4_moe_debug": "GLM-4.5",
        "deepseek_v2_debug": "DeepSeek-V2",
    }
    kinds = ("none", "bias", "aux")
    rows = [[names[recipe], *(by[kind] for kind in kinds)] for recipe, by in found.items()]
    return markdown(["`[model] balance`", *(f"`{kind}`" for kind in kinds)], rows)


def read(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def percent(fraction: float, digits: int) -> str:
    return f"{100 * fraction:.{digits}f} %"


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, *rows)]
    lines.insert(1, "|" + "---|" * len(heads))
    return "\n".join(lines).replace("|  |", "| |")


TABLES = {
    table.__name__: table
    for table in (figures, loss, planners, planning_time, rows_planning, step, misses, balance)
}

if __name__ == "__main__":
    sys.exit(main())
