"""The rows of the planner bench for people: one line each, and what they say about `joint`."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]

_CELL = ("experts", "top_k", "hidden", "moe_intermediate", "ranks", "ranks_per_node")
_CASE = (*_CELL, "replica_slots", "workload", "router_skew")


LEGEND = """\
E/K/D/F  experts, top-k, model width, expert width; group: nodes x ranks a node; S: replica slots
max/mean busiest rank over mean rank; inter: assignments executed on another node; replica: by one
modelled MoE layer, forward and backward, by the closed cost model; plan: measured here, median
/bound   modelled over a lower bound of every plan that keeps mains and slots: 1.00 is optimal
free     in a planner's name: mains may move and slots may be exceeded, so no rival under the rules
%        after joint: of the compute term, what its score adds so as to level more than time asks
last     joint's modelled time over others' (below 1: faster): the geometric mean over skewed loads,
         the worst load, the mean; MILP best: the best plan of a solver's minute, with --bounds"""


def table_line(row: Row | None) -> str:
    """One line of the terminal's table; the heading for None."""
    if row is None:
        return (
            f"{'planner':14}{'':10}{'E/K/D/F':>15} {'group':>6} {'S':>2} "
            f"{'workload':>9} {'seed':>4}{'max/mean':>10}{'inter':>8}{'replica':>9}"
            f"{'modelled':>11}{'/bound':>8}{'plan':>11}"
        )
    shape = "/".join(str(row[k]) for k in ("experts", "top_k", "hidden", "moe_intermediate"))
    group = f"{row['ranks'] // row['ranks_per_node']}x{row['ranks_per_node']}"
    skew_of = "" if row["router_skew"] is None else f" {row['router_skew']:g}"
    name = row["planner"]
    if row["balance_weight"] is not None:
        name += f" {row['balance_weight']}%"
    total = row["modelled_us"]["total"]
    ratio = f"{total / row['bound_us']:.2f}" if row["bound_us"] else "-"
    return (
        f"{name:14}{row['implementation']:10}{shape:>15} {group:>6} "
        f"{row['replica_slots']:2} {row['workload'] + skew_of:>9} {row['seed']:4}"
        f"{row['max_over_mean']:10.3f}{row['inter_node_fraction']:8.1%}"
        f"{row['replica_served_fraction']:9.1%}{total / 1e3:8.2f} ms{ratio:>8}"
        f"{row['plan_us']:8.0f} us"
    )


def summary(rows: Iterable[Row], planner: str = "joint") -> list[dict[str, Any]]:
    """How ``planner`` stands in each cell, over the cell's workloads (their seed means).

    ``over_topoep``, ``over_none``, ``over_best_other`` and ``over_milp_best`` are ratios of
    modelled totals: the geometric mean over ``skew`` workloads for the first, the worst case for
    ``none`` and the best other planner that keeps mains and slots, the mean for the MILP's
    solution. None where a side is missing. The first balance weight of a planner counts.
    """
    totals: dict[tuple, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    seen = set()
    for row in rows:
        case = tuple(row[key] for key in _CASE)
        once = case, row["seed"], row["planner"]
        if once in seen:  # another implementation or balance weight of the same planner
            continue
        seen.add(once)
        if not row["planner"].endswith("-free"):  # out of the rules: mains move, slots are exceeded
            totals[case][row["planner"]].append(row["modelled_us"]["total"])
        if row["planner"] == planner and row["best_us"]:
            totals[case]["MILP"].append(row["best_us"])
    cells: dict[tuple, dict[tuple, dict[str, float]]] = defaultdict(dict)
    for case, by_planner in totals.items():
        means = {name: statistics.mean(values) for name, values in by_planner.items()}
        if planner in means:
            cells[case[: len(_CELL) + 1]][case[len(_CELL) + 1 :]] = means
    return [
        {**dict(zip((*_CELL, "replica_slots"), cell)), **_standing(cases, planner)}
        for cell, cases in cells.items()
    ]


def _standing(cases: dict[tuple, dict[str, float]], planner: str) -> dict[str, float | None]:
    def over(other: str, only_skew: bool = False) -> list[float]:
        return [
            means[planner] / means[other]
            for (workload, _), means in cases.items()
            if other in means and not (only_skew and workload != "skew")
        ]

    others = []
    for means in cases.values():
        rivals = [value for name, value in means.items() if name not in (planner, "MILP")]
        others += [means[planner] / min(rivals)] if rivals else []
    topoep, milp = over("topoep", only_skew=True), over("MILP")
    return {
        "over_topoep": math.exp(statistics.mean(map(math.log, topoep))) if topoep else None,
        "over_none": max(over("none"), default=None),
        "over_best_other": max(others, default=None),
        "over_milp_best": statistics.mean(milp) if milp else None,
    }


def summary_lines(rows: Iterable[Row], planner: str = "joint") -> list[str]:
    """The summary as a table for the terminal; empty when ``planner`` was not run."""
    lines = [
        f"{planner + ' over':32}{'topoep':>9}{'none':>9}{'best other':>12}{'MILP best':>11}",
        f"{'':32}{'(skew)':>9}{'(worst)':>9}{'(worst)':>12}{'(mean)':>11}",
    ]
    for cell in summary(rows, planner):
        shape = "/".join(str(cell[k]) for k in ("experts", "top_k", "hidden", "moe_intermediate"))
        group = f"{cell['ranks'] // cell['ranks_per_node']}x{cell['ranks_per_node']}"
        values = (cell[f"over_{name}"] for name in ("topoep", "none", "best_other", "milp_best"))
        texts = ["-" if value is None else f"{value:.3f}" for value in values]
        lines.append(
            f"{shape:>16} {group:>6} S={cell['replica_slots']:<5}"
            f"{texts[0]:>9}{texts[1]:>9}{texts[2]:>12}{texts[3]:>11}"
        )
    return lines if len(lines) > 2 else []
