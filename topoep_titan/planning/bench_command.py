"""``topoep bench-planner``: quality and time of every planner, as a table or as JSON."""

import argparse
import json
import sys

import torch

from topoep_titan.cluster import load_cluster
from topoep_titan.errors import InputError
from topoep_titan.planning.bench import CELLS, DEFAULT_CELLS, TINY_CELLS, bench_rows
from topoep_titan.planning.bench_table import LEGEND, summary_lines, table_line
from topoep_titan.planning.joint import BALANCE_WEIGHT


def bench_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--cells", type=_names, help=f"of: {','.join(CELLS)} (default: {','.join(DEFAULT_CELLS)})")
    add("--planner", type=_names, help="only these (default: every planner)")
    add("--slots", type=integer_list, default=(2,), help="replica slots a rank (default: 2)")
    add("--seeds", type=integer_list, default=(0,), help="seeds of the workloads (default: 0)")
    add(
        "--balance-weight", type=integer_list, default=(BALANCE_WEIGHT,),
        help=f"of joint, per cent (default: {BALANCE_WEIGHT})",
    )  # fmt: skip
    add("--cluster", default="h800_4x8", help="rates, name or .toml (default: %(default)s)")
    add("--fastest", action="store_true", help="leave out the specification of compiled planners")
    add("--bounds", action="store_true", help=f"add {','.join(TINY_CELLS)} with their MILP bounds")
    add("--json", action="store_true", help="print one JSON object")


def bench(arguments: argparse.Namespace) -> int:
    cells = arguments.cells or DEFAULT_CELLS
    if arguments.bounds:
        cells = (*cells, *(cell for cell in TINY_CELLS if cell not in cells))
    for option in ("slots", "seeds", "balance_weight"):
        if min(getattr(arguments, option)) < 0:
            raise InputError(
                f"--{option.replace('_', '-')} holds {min(getattr(arguments, option))}; "
                "give integers of at least 0"
            )
    rows = []
    torch.set_num_threads(1)  # one core, as a rank's planner has
    people = sys.stderr if arguments.json else sys.stdout
    for row in bench_rows(
        load_cluster(arguments.cluster), cells, arguments.planner, arguments.slots,
        arguments.seeds, arguments.balance_weight, arguments.bounds, arguments.fastest,
    ):  # fmt: skip
        lines = [table_line(row)] if rows else [table_line(None), table_line(row)]
        print(*lines, sep="\n", file=people, flush=True)
        rows.append(row)
    standing = summary_lines(rows)
    print("", *standing, *[""] * bool(standing), LEGEND, sep="\n", file=people)
    if arguments.json:
        print(json.dumps({"rows": rows}))
    return 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def integer_list(text: str) -> tuple[int, ...]:  # argparse shows the name when it fails
    return tuple(int(part) for part in text.split(","))
