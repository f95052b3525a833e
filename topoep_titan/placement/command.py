"""``topoep placement``: fit a placement on recorded or drawn routing, and judge one.

    topoep placement fit      --trace RUN/trace --ranks 8 --out p.npz   (or --ids, --preset)
    topoep placement evaluate --trace ... --placement p.npz

Letters: L layers, R ranks of a trace, T tokens, K top-k, E experts.
"""

import argparse
import io
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from topoep_titan.errors import InputError
from topoep_titan.placement.native import place
from topoep_titan.placement.quality import PlacementQuality, placement_quality
from topoep_titan.planning.coupled import PRESETS, coupled
from topoep_titan.planning.plan import contiguous_mains
from topoep_titan.results import write_atomically

TOKENS, LAYERS = 8192, 1  # of a preset's draw


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
        add("--tokens", type=int, default=TOKENS, help="of a preset (default: %(default)s)")
        add("--layers", type=int, default=LAYERS, help="of a preset (default: %(default)s)")
        add("--seed", type=int, default=0, help="of a preset's draw and of the solver")
        add("--json", action="store_true", help="print one JSON object")
        if name == "fit":
            add("--experts", type=int, help="default: the preset's, or the highest id and one")
            add("--ranks", type=int, required=True)
            add("--ranks-per-node", type=int, help="default: all ranks in one node")
            add("--node-weight", type=int, default=4, help="rows of a node (default: %(default)s)")
            add("--balance-weight", type=int, default=200, help="per cent (default: %(default)s)")
            add("--out", type=Path, required=True, help="write main_LE and the group to this .npz")
        else:
            add("--placement", type=Path, required=True, help=".npz that fit wrote")
        command.set_defaults(run=run)


def _fit(arguments: argparse.Namespace) -> int:
    ids_LTK = read_ids(arguments)
    experts = arguments.experts
    if experts is None:
        preset = PRESETS.get(arguments.preset)
        experts = preset.experts if preset else int(ids_LTK.max()) + 1
    ranks, per_node = arguments.ranks, arguments.ranks_per_node or arguments.ranks
    if arguments.out.is_dir() or not arguments.out.parent.is_dir():
        raise InputError(f"output {arguments.out}: give a file in an existing folder")
    started = time.perf_counter()
    main_LE = torch.stack(
        [
            place(
                ids_TK, experts=experts, ranks=ranks, ranks_per_node=per_node,
                node_weight=arguments.node_weight, balance_weight=arguments.balance_weight,
                seed=arguments.seed,
            )
            for ids_TK in ids_LTK
        ]
    )  # fmt: skip
    seconds = time.perf_counter() - started
    buffer = io.BytesIO()
    np.savez(buffer, main_LE=main_LE.numpy(), ranks=ranks, ranks_per_node=per_node)
    write_atomically(arguments.out, buffer.getvalue())
    _report(arguments, ids_LTK, main_LE, ranks, per_node, {"solver_seconds": seconds})
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    try:
        with np.load(arguments.placement, allow_pickle=False) as archive:
            main_LE = torch.from_numpy(archive["main_LE"].astype(np.int64))
            ranks, per_node = int(archive["ranks"]), int(archive["ranks_per_node"])
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        raise InputError(
            f"{arguments.placement} is no placement ({error}); give a file that "
            "`topoep placement fit` wrote"
        ) from None
    ids_LTK = read_ids(arguments)
    if len(main_LE) != len(ids_LTK):
        raise InputError(
            f"{arguments.placement} places {len(main_LE)} layers, the routing has {len(ids_LTK)}; "
            "give routing of the same model"
        )
    _report(arguments, ids_LTK, main_LE, ranks, per_node, {})
    return 0


def read_ids(arguments: argparse.Namespace) -> Tensor:
    """int16 (L, T, K) of whichever source is named. Raises InputError when it cannot be read."""
    if arguments.preset:
        for name in ("tokens", "layers"):
            if getattr(arguments, name) < 1:
                raise InputError(f"--{name} is {getattr(arguments, name)}; give at least 1")
        if arguments.seed < 0:
            raise InputError(f"--seed is {arguments.seed}; give 0 or more")
        return coupled(
            PRESETS[arguments.preset],
            layers=arguments.layers,
            tokens=arguments.tokens,
            seed=arguments.seed,
        )
    if arguments.ids:
        ids = _load(arguments.ids, None)
        if ids.ndim < 2:
            raise InputError(f"{arguments.ids} has shape {ids.shape}; give (..., tokens, top-k)")
        return torch.from_numpy(ids.reshape(1, -1, ids.shape[-1]))
    files = sorted(arguments.trace.glob("step-*.npz")) if arguments.trace.is_dir() else []
    files = files or [arguments.trace]
    steps = [_load(file, "ids") for file in files]
    if any(step.ndim != 4 or step.shape[0] != steps[0].shape[0] for step in steps):
        raise InputError(f"{arguments.trace}: ids must be (layers, ranks, tokens, top-k)")
    return torch.from_numpy(
        np.concatenate([ids.reshape(len(ids), -1, ids.shape[-1]) for ids in steps], axis=1)
    )


def _load(path: Path, key: str | None) -> np.ndarray:
    try:
        loaded = np.load(path, allow_pickle=False)
        array = loaded if key is None else loaded[key]
    except (OSError, ValueError, EOFError, KeyError, IndexError, BadZipFile) as error:
        raise InputError(
            f"{path} holds no expert ids ({error}); record them with topoep.record_trace = true, "
            "or draw them with `topoep workload --ids-out`"
        ) from None
    if not isinstance(array, np.ndarray) or array.dtype.kind != "i":
        raise InputError(f"{path} holds no array of signed integers")
    return array


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
        print(f"{key:22}{'':12}{value:12.3f}")
