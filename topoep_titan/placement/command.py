"""``topoep placement``: fit a placement on recorded or drawn routing, and judge one.

    topoep placement fit      --trace RUN/trace --ranks 8 --out p.npz   (or --ids, --preset)
    topoep placement evaluate --trace ... --placement p.npz

Letters: L layers, R ranks of a trace, T tokens, K top-k, E experts.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from topoep_titan.errors import InputError
from topoep_titan.files import check_output, read_archive, read_array, write_arrays
from topoep_titan.placement.native import place
from topoep_titan.placement.quality import PlacementQuality, placement_quality
from topoep_titan.placement.sets import BALANCE_WEIGHT
from topoep_titan.planning.coupled import PRESETS, coupled
from topoep_titan.planning.plan import check_mains, contiguous_mains
from topoep_titan.planning.recorded import check_routing, read_step, step_files

TOKENS, LAYERS = 8192, 1
MOST_TOKENS, MOST_LAYERS = 2**20, 2**10  # a few thousand tokens suffice; time grows with them
MOST_EXPERTS = 2**12  # tables of pairs: 128 MiB each
SILENT_SECONDS = 3.0  # before progress is shown


def add_commands(placement: argparse.ArgumentParser) -> None:
    """The two subcommands; each sets ``run``."""
    actions = placement.add_subparsers(dest="action", required=True, metavar="fit|evaluate")
    for name, help_text, run in (
        ("fit", "place the experts of every layer", _fit),
        ("evaluate", "rows, nodes, locality and load under a placement", _evaluate),
    ):
        command = actions.add_parser(name, help=help_text, description=help_text)
        add = command.add_argument
        source = command.add_mutually_exclusive_group(required=True)
        source.add_argument("--trace", type=Path, help="trace/ of a run, or one step-*.npz of it")
        source.add_argument("--ids", type=Path, help=".npy of expert ids (..., tokens, top-k)")
        source.add_argument("--preset", choices=list(PRESETS), help="drawn routing")
        add("--tokens", type=int, default=TOKENS,
            help="of a preset, and of fit's sample (default: %(default)s)")  # fmt: skip
        add("--layers", type=int, default=LAYERS, help="of a preset (default: %(default)s)")
        add("--seed", type=int, default=0, help="of a preset's draw and of the solver")
        add("--json", action="store_true", help="print one JSON object")
        if name == "fit":
            add("--experts", type=int, help="default: the preset's, or the highest id and one")
            add("--ranks", type=int, required=True)
            add("--ranks-per-node", type=int, help="default: the trace's, else all in one node")
            add("--node-weight", type=int, default=4, help="rows of a node (default: %(default)s)")
            per_cent = "per cent (default: %(default)s)"
            add("--balance-weight", type=int, default=BALANCE_WEIGHT, help=per_cent)
            add("--out", type=Path, required=True, help="write main_LE and the group to this .npz")
        else:
            add("--placement", type=Path, required=True, help=".npz that fit wrote")
        command.set_defaults(run=run)


def _fit(arguments: argparse.Namespace) -> int:
    check_output(arguments.out, arguments.trace, arguments.ids)
    routing = read_routing(arguments)
    ids_LTK, highest = routing.ids_LTK, int(routing.ids_LTK.max())
    experts = arguments.experts
    if experts is None:
        preset = PRESETS.get(arguments.preset)
        experts = preset.experts if preset else highest + 1
    if not highest < experts <= MOST_EXPERTS:
        raise InputError(
            f"{experts} experts; the ids go up to {highest}, and a placement has at most "
            f"{MOST_EXPERTS}"
        )
    ranks = arguments.ranks
    per_node = arguments.ranks_per_node
    if per_node is None:
        per_node = min(ranks, routing.ranks_per_node or ranks)
    if arguments.trace and arguments.ranks_per_node is None and routing.ranks_per_node is None:
        print(
            f"topoep: the trace does not say how many ranks shared a node; taking one node of "
            f"{ranks} (--ranks-per-node says otherwise)",
            file=sys.stderr,
        )
    sample_LTK = _sample(ids_LTK, arguments.tokens, arguments.seed)
    started, mains = time.perf_counter(), []
    for layer, (sample_TK, ids_TK) in enumerate(zip(sample_LTK, ids_LTK)):
        if sys.stderr.isatty() and time.perf_counter() - started > SILENT_SECONDS:
            print(f"{layer} of {len(ids_LTK)} layers\033[K", end="\r", file=sys.stderr, flush=True)
        mains.append(
            place(
                sample_TK, experts=experts, ranks=ranks, ranks_per_node=per_node,
                load_E=torch.bincount(ids_TK.flatten().long(), minlength=experts),
                node_weight=arguments.node_weight, balance_weight=arguments.balance_weight,
                seed=arguments.seed,
            )
        )  # fmt: skip
    seconds, main_LE = time.perf_counter() - started, torch.stack(mains)
    arrays = {"ranks": np.array(ranks), "ranks_per_node": np.array(per_node)}
    write_arrays(arguments.out, {"main_LE": main_LE.numpy(), **arrays})
    more = {"fitted_tokens": sample_LTK.shape[1], "solver_seconds": seconds}
    _report(arguments, ids_LTK, main_LE, ranks, per_node, more)
    return 0


def _sample(ids_LTK: Tensor, tokens: int, seed: int) -> Tensor:
    """Random tokens, the same in every layer: the solver's time grows with them, and a few
    thousand of many steps and documents tell as much."""
    if ids_LTK.shape[1] <= tokens:
        return ids_LTK
    taken = torch.randperm(ids_LTK.shape[1], generator=torch.Generator().manual_seed(seed))
    return ids_LTK[:, taken[:tokens].sort().values]


def _evaluate(arguments: argparse.Namespace) -> int:
    main_LE, ranks, per_node = read_placement(arguments.placement)
    ids_LTK = read_routing(arguments).ids_LTK
    if len(main_LE) != len(ids_LTK):
        raise InputError(
            f"{arguments.placement} places {len(main_LE)} layers, the routing has {len(ids_LTK)}; "
            "give routing of the same model"
        )
    _report(arguments, ids_LTK, main_LE, ranks, per_node, {})
    return 0


def read_placement(path: Path) -> tuple[Tensor, int, int]:
    """int64 main_LE (L, E), ranks and ranks per node. Raises InputError for no placement."""
    remedy = "give a file that `topoep placement fit` wrote"
    keys = ("main_LE", "ranks", "ranks_per_node")
    found = read_archive(path, keys, of="a placement", remedy=remedy)
    whole = all(array.dtype.kind in "iu" for array in found.values())
    if not whole or [found[key].ndim for key in keys] != [2, 0, 0] or not found["main_LE"].size:
        raise InputError(f"{path} is not a placement (shapes or types); {remedy}")
    main_LE = torch.from_numpy(found["main_LE"].astype(np.int64))
    ranks, per_node = int(found["ranks"]), int(found["ranks_per_node"])
    experts = main_LE.shape[1]
    if ranks < 1 or experts % ranks or per_node < 1 or ranks % per_node:
        raise InputError(
            f"{path} is not a placement ({experts} experts on {ranks} ranks in nodes of "
            f"{per_node}); {remedy}"
        )
    for main_E in main_LE:
        check_mains(main_E, ranks, experts)
    return main_LE, ranks, per_node


@dataclass(frozen=True)
class Routing:
    ids_LTK: Tensor  # int16
    ranks_per_node: int | None = None  # of the run that recorded it, where it is known


def read_routing(arguments: argparse.Namespace) -> Routing:
    """Of whichever source is named. Raises InputError when it cannot be read."""
    for name, most in (("tokens", MOST_TOKENS), ("layers", MOST_LAYERS)):
        if not 1 <= getattr(arguments, name) <= most:
            given = getattr(arguments, name)
            raise InputError(f"--{name} is {given}; give an integer from 1 to {most}")
    if not 0 <= arguments.seed < 2**63:
        raise InputError(f"--seed is {arguments.seed}; give an integer from 0 to 2**63 - 1")
    if arguments.preset:
        drawn = coupled(
            PRESETS[arguments.preset],
            layers=arguments.layers,
            tokens=arguments.tokens,
            seed=arguments.seed,
        )
        return Routing(drawn)
    if arguments.ids:
        ids = read_array(arguments.ids, "draw expert ids with `topoep workload --ids-out`")
        check_routing(ids, arguments.ids)
        return Routing(torch.from_numpy(ids.reshape(1, -1, ids.shape[-1]).astype(np.int16)))
    files = step_files(arguments.trace)
    steps = [read_step(file) for file in files]
    shapes = [(len(step.ids_LRTK), step.ids_LRTK.shape[3], step.ranks_per_node) for step in steps]
    for file, shape in zip(files, shapes):
        if shape != shapes[0]:
            raise InputError(
                f"{file}: layers, top-k and ranks per node are {shape}, {shapes[0]} in the first "
                "step; give the steps of one run"
            )
    layers, top_k, per_node = shapes[0]
    parts = [step.ids_LRTK.reshape(layers, -1, top_k).astype(np.int16) for step in steps]
    return Routing(torch.from_numpy(np.concatenate(parts, axis=1)), per_node)


def _report(
    arguments: argparse.Namespace,
    ids_LTK: Tensor,
    main_LE: Tensor,
    ranks: int,
    per_node: int,
    more: dict[str, float],
) -> None:
    """Means over layers, of the given placement and of the contiguous one."""

    def mean(mains: Sequence[Tensor]) -> dict[str, float]:
        layers: list[PlacementQuality] = [
            placement_quality(ids_TK, main_E, ranks=ranks, ranks_per_node=per_node)
            for ids_TK, main_E in zip(ids_LTK, mains)
        ]
        rows = [asdict(quality) for quality in layers]
        return {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}

    contiguous = [contiguous_mains(ranks, main_LE.shape[1])] * len(main_LE)
    found = {"contiguous": mean(contiguous), "placed": mean(main_LE)}
    if arguments.json:
        sizes = {"layers": len(main_LE), "tokens": ids_LTK.shape[1], "ranks": ranks}
        print(json.dumps({**sizes, "ranks_per_node": per_node, **found, **more}))
        return
    print(f"{'mean over layers':22}{'contiguous':>12}{'placed':>12}")
    for key, value in found["contiguous"].items():
        print(f"{key:22}{value:12.3f}{found['placed'][key]:12.3f}")
    for key, value in more.items():
        print(f"{key:22}{'':12}{value:12{',.3f' if isinstance(value, float) else ',d'}}")
