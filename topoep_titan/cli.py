"""The ``topoep`` command: plan a load, draw a workload, measure planners, simulate steps, report.

Exit codes: 0 done, 2 the input is wrong (one sentence on stderr), 1 anything else.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from topoep_titan.cluster import Cluster, ModelDims, load_cluster
from topoep_titan.cluster.cost_model import check_prices
from topoep_titan.errors import InputError
from topoep_titan.files import check_output, read_array, write_arrays
from topoep_titan.planning import PLANNERS, check_load, check_plan, planner_named
from topoep_titan.planning.bench import timed
from topoep_titan.planning.bench_command import bench, bench_options
from topoep_titan.planning.plan import contiguous_mains
from topoep_titan.planning.quality import plan_quality
from topoep_titan.planning.recorded import check_routing
from topoep_titan.planning.sets import DISPATCHERS, check_sets, plan_sets, rows_by_link
from topoep_titan.planning.workloads import coupled_ids, load_of, skew, zipf
from topoep_titan.simulator.command import simulate, simulate_options

DEFAULT_CLUSTER = "h800_4x8"  # the paper's testbed
MOST_WIDTH = 10**6  # of hidden and moe-intermediate: modelled picoseconds stay far inside int64
MOST_PLAN_COUNTS = 2**28  # ranks x slots of assignments_RG: 1 GiB


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["convert"]:  # has a parser of its own, and alone here needs torchtitan
        from topoep_titan.titan.convert import main as convert

        return convert(argv[1:])
    if argv[:1] == ["doctor"]:  # the same
        from topoep_titan.titan.doctor import main as doctor

        return doctor(argv[1:])
    try:
        arguments = _parser().parse_args(argv)
        return arguments.run(arguments)
    except InputError as error:
        print(f"topoep: {error}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """Its complaints are InputErrors, one sentence like all others."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="topoep", description="Plan and price expert-parallel MoE loads.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_text, add_options, run in (
        ("plan", "plan one load and price the plan", _plan_options, _plan),
        ("workload", "draw a standard workload", _workload_options, _workload),
        ("bench-planner", "quality and time of every planner", bench_options, bench),
        ("simulate", "what a step takes under each planner", simulate_options, simulate),
        ("placement", "place experts that serve a token together", _placement_options, None),
        ("report", "compare finished runs in one page", _report_options, _report),
    ):
        command = commands.add_parser(name, help=help_text, description=help_text)
        add_options(command)
        if run:
            command.set_defaults(run=run)
    commands.add_parser("convert", help="checkpoints from and to the Hugging Face format")
    commands.add_parser(
        "doctor", help="what this machine has, and whether a recipe fits its device"
    )
    return parser


# --- topoep placement


def _placement_options(command: argparse.ArgumentParser) -> None:
    from topoep_titan.placement.command import add_commands

    add_commands(command)


# --- topoep report


def _report_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="outputs/NAME of a run")
    command.add_argument(
        "--out", type=Path, default=Path("outputs/report"), help="folder (default: %(default)s)"
    )


def _report(arguments: argparse.Namespace) -> int:
    from topoep_titan.reports.page import report_command  # matplotlib: only when it is wanted

    print(f"report: {report_command(arguments.runs, arguments.out)}")
    return 0


# --- topoep plan


def _plan_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--load", type=Path, required=True, help=".npy of integer counts (ranks, experts)")
    add("--ids", type=Path, help=".npy of the expert ids that --load counts: plan and price rows")
    add("--dispatcher", choices=DISPATCHERS, default="dedup-node", help="of rows (with --ids)")
    add("--planner", required=True, help=f"one of: {', '.join(PLANNERS)}")
    add("--replica-slots", type=int, required=True, help="replica slots a rank")
    add("--hidden", type=int, required=True, help="model width")
    add("--moe-intermediate", type=int, required=True, help="width of one expert")
    add("--ranks-per-node", type=int, help="ranks of one NVLink domain (default: the cluster's)")
    add("--cluster", default=DEFAULT_CLUSTER, help="name or .toml file (default: %(default)s)")
    add("--main", type=Path, help=".npy of each expert's main rank (default: contiguous)")
    add("--out", type=Path, help="write expert_G, assignments_RG and main_E to this .npz")
    add("--json", action="store_true", help="print one JSON object")


def _plan(arguments: argparse.Namespace) -> int:
    planner, dispatcher = planner_named(arguments.planner), arguments.dispatcher
    load_RE = _read_integers(arguments.load)
    ids_RTK = _read_integers(arguments.ids) if arguments.ids else None
    main_E = _read_integers(arguments.main) if arguments.main else None
    check_load(load_RE, main_E, arguments.replica_slots)
    ranks, experts = load_RE.shape
    slots = ranks * (experts // ranks + arguments.replica_slots)
    if ranks * slots > MOST_PLAN_COUNTS:
        raise InputError(
            f"{arguments.replica_slots} replica slots make a plan of {ranks} x {slots} counts; "
            f"at most {MOST_PLAN_COUNTS}, and more than {experts - experts // ranks} slots a rank "
            "are never used"
        )
    if main_E is None:
        main_E = contiguous_mains(ranks, experts)
    cluster = _cluster(arguments, ranks)
    dims = ModelDims(
        hidden=_at_least_1("--hidden", arguments.hidden, MOST_WIDTH),
        moe_intermediate=_at_least_1("--moe-intermediate", arguments.moe_intermediate, MOST_WIDTH),
    )
    check_output(arguments.out, arguments.load, arguments.main, arguments.ids)
    copies = ranks * arguments.replica_slots
    check_prices(cluster, dims, assignments=int(load_RE.sum()), copies=copies)
    settings = {
        "main_E": main_E, "cluster": cluster, "model_dims": dims,
        "replica_slots": arguments.replica_slots,
    }  # fmt: skip
    rows_RX = None
    if ids_RTK is None:
        plan, plan_us = timed(lambda: planner(load_RE, **settings))
    else:
        check_routing(ids_RTK.numpy(), arguments.ids)
        check_sets(ids_RTK, load_RE)
        (plan, rows_RX), plan_us = timed(
            lambda: plan_sets(
                arguments.planner, ids_RTK, load_RE, dispatcher=dispatcher, **settings
            )
        )
    check_plan(plan, load_RE, main_E, arguments.replica_slots)  # a planner of yours may break a law
    quality = plan_quality(
        plan, main_E=main_E, cluster=cluster, model_dims=dims,
        dispatcher=dispatcher, rows_RX=rows_RX,
    )  # fmt: skip
    report = {
        "planner": arguments.planner,
        "max_over_mean": quality.max_over_mean,
        "inter_node_fraction": quality.inter_node_fraction,
        "replica_served_fraction": quality.replica_served_fraction,
        "num_replicas": quality.num_replicas,
        "modelled_us": quality.modelled.as_us(),
        "plan_us": plan_us,
    }
    if rows_RX is not None:
        report |= {"dispatcher": dispatcher, "rows": rows_by_link(rows_RX, cluster, dispatcher)}
    if arguments.out:
        arrays = {
            "expert_G": plan.expert_G.numpy(),
            "assignments_RG": plan.assignments_RG.numpy(),
            "main_E": main_E.numpy(),
        }
        write_arrays(arguments.out, arrays)
    print(json.dumps(report) if arguments.json else _plan_text(report, cluster))
    return 0


def _plan_text(report: dict[str, Any], cluster: Cluster) -> str:
    us = report["modelled_us"]
    terms = ", ".join(f"{name} {us[name]:.0f}" for name in ("compute", "token", "replica", "plan"))
    rows = ""
    if "rows" in report:
        rows = "\n  rows of one dispatch          {far} across nodes, {near} within".format(
            **report["rows"]
        )
    return (
        f"{report['planner']} on {cluster.nodes} x {cluster.ranks_per_node} ranks "
        f"(rates of {cluster.name})\n"
        f"  busiest over mean rank load   {report['max_over_mean']:.3f}\n"
        f"  executed on another node      {report['inter_node_fraction']:.2%}\n"
        f"  executed by replicas          {report['replica_served_fraction']:.2%}, "
        f"{report['num_replicas']} replicas\n"
        f"  modelled layer, microseconds  {us['total']:.0f} ({terms})\n"
        f"  planning, measured here       {report['plan_us']:.0f} microseconds{rows}"
    )


# --- topoep workload


def _workload_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--kind", choices=("skew", "zipf", "coupled"), required=True)
    add("--experts", type=int, required=True)
    add("--top-k", type=int, required=True)
    add("--ranks", type=int, required=True)
    add("--tokens-per-rank", type=int, required=True)
    add("--router-skew", type=float, help="kind skew: 0 is uniform, the default -4 most skewed")
    add("--seed", type=int, required=True)
    add("--out", type=Path, required=True, help="write the int64 load (ranks, experts), .npy")
    add("--ids-out", type=Path, help="write the int16 expert ids (ranks, tokens, top-k), .npy")


def _workload(arguments: argparse.Namespace) -> int:
    if arguments.seed < 0:
        raise InputError(f"--seed is {arguments.seed}; give an integer of at least 0")
    check_output(arguments.out)
    check_output(arguments.ids_out, arguments.out)
    ids_RTK = _draw(arguments)
    load_RE = load_of(ids_RTK, arguments.experts)
    for path, tensor in ((arguments.ids_out, ids_RTK), (arguments.out, load_RE)):
        if path:
            write_arrays(path, tensor.numpy())
            print(f"{path}: {tensor.numpy().dtype} {tuple(tensor.shape)}")
    return 0


def _draw(arguments: argparse.Namespace) -> Tensor:
    kind, router_skew, seed = arguments.kind, arguments.router_skew, arguments.seed
    shape = arguments.experts, arguments.top_k, arguments.ranks, arguments.tokens_per_rank
    if kind == "skew":
        router_skew = -4.0 if router_skew is None else router_skew
        return skew(*shape, router_skew=router_skew, seed=seed)
    if router_skew is not None:
        raise InputError(
            f"--router-skew is {router_skew:g}, but kind {kind} has none; "
            "leave it out or use --kind skew"
        )
    return zipf(*shape, seed=seed) if kind == "zipf" else coupled_ids(*shape, seed=seed)


# --- shared


def _cluster(arguments: argparse.Namespace, ranks: int) -> Cluster:
    per_node = arguments.ranks_per_node
    if per_node is not None:
        _at_least_1("--ranks-per-node", per_node, ranks)
    return load_cluster(arguments.cluster).resized(ranks, per_node)


def _at_least_1(option: str, value: int, most: int) -> int:
    if not 1 <= value <= most:
        raise InputError(f"{option} is {value}; give an integer from 1 to {most}")
    return value


def _read_integers(path: Path) -> Tensor:
    """The array of a .npy file as int64. Raises InputError for anything but integers."""
    array = read_array(path)
    if array.dtype.kind not in "iu" or not np.can_cast(array.dtype, np.int64):
        raise InputError(f"{path} holds {array.dtype} values; save whole numbers as int64")
    return torch.from_numpy(array.astype(np.int64))


if __name__ == "__main__":
    sys.exit(main())
