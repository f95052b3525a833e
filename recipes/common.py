"""What the reproduction programs share: published targets, cells, progress, and the result file.

A program answers one question and writes ``results/figures/<question>.json``: the published values
beside ours, tables and curves, with the conditions. The report draws them.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from topoep_titan.errors import InputError
from topoep_titan.planning.workloads import load_of
from topoep_titan.results import provenance, write_atomically
from topoep_titan.simulator.models import Model, model_named
from topoep_titan.simulator.paper_step import (  # noqa: F401 (what programs share)
    SLOTS,
    TOKENS,
    matched_seeds,
    paper_cluster,
    paper_models,
    published,
    simulated,
    skewed,
    unexplained,
)
from topoep_titan.simulator.traces import Microbatch, synthetic

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "results" / "figures"
PUBLISHED = published()
MODELS = paper_models()
TITLES = dict(zip(MODELS, ("Qwen3-30B-A3B", "GLM-4.5-Air", "DeepSeek-V2")))
ROUTER_SKEWS = (0.0, -0.5, -1.0, -2.0, -4.0)
Item = TypeVar("Item")


def consecutive(model: Model, router_skew: float, seed: int) -> tuple[Microbatch, Microbatch]:
    """Two microbatches under one bias, for a planner that only knows the earlier load."""
    both = synthetic(
        "skew", layers=1, experts=model.experts, top_k=model.top_k, ranks=model.expert_parallel,
        tokens=2 * TOKENS, seed=seed, router_skew=router_skew,
    )  # fmt: skip
    halves = []
    for ids_RTK in both.ids_LRTK[0].split(TOKENS, dim=1):
        load_RE = load_of(ids_RTK, model.experts)
        halves.append(Microbatch([ids_RTK] * model.moe_layers, [load_RE] * model.moe_layers))
    return tuple(halves)


@dataclass(frozen=True)
class Testbed:
    """A model of the paper on its cluster, and the draws that stand for the paper's."""

    index: int  # in the lists of published.toml
    model: Model
    title: str
    seeds: list[int]
    drawn: list[Microbatch]  # at router_skew -4, one of each seed
    rest: float  # seconds of a step that neither layers nor FLOPs explain


def testbeds() -> Iterator[Testbed]:
    """The three models; how many are done is shown."""
    for index, name in enumerate(progress(MODELS, len(MODELS), "models")):
        model = model_named(name)
        seeds = matched_seeds(model)
        drawn = [skewed(model, -4.0, seed) for seed in seeds]
        yield Testbed(index, model, TITLES[name], seeds, drawn, unexplained(model, drawn))


def value(
    what: str,
    published: float | str | None,
    ours: float | None,
    unit: str = "",
    *,
    within: float | None = None,
    why: str = "",
) -> dict[str, Any]:
    """One row of the comparison. ``within``: the agreed band around the published value."""
    met = None if within is None else bool(abs(ours - published) <= within)
    return {
        "what": what, "published": published, "ours": ours, "unit": unit, "within": within,
        "met": met, "why": why,
    }  # fmt: skip


def curve(panel: str, label: str, x: list, y: list, *, published: bool = False) -> dict[str, Any]:
    return {"panel": panel, "label": label, "x": x, "y": y, "published": published}


def answer(
    question: Callable[[], dict[str, Any]], *, figure: str, kind: str, text: str, name: str
) -> int:
    """Run a program's ``question`` and write its result file; the program's exit code."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--out", type=Path, default=FIGURES, help="folder (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    try:
        result = question()
        options.out.mkdir(parents=True, exist_ok=True)
    except InputError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    result = {
        "figure": figure,
        "question": text,
        "kind": kind,
        "command": f"python -m recipes.{name}",
        "seconds": round(time.perf_counter() - started, 1),
        "commit": provenance()["commit"],
        **result,
    }
    path = options.out / f"{name}.json"
    write_atomically(path, json.dumps(result, indent=1) + "\n")
    print(f"{figure}: {text}")
    for row in result["values"]:
        print(f"  {row['what']}: published {shown(row['published'])}, ours {shown(row['ours'])} "
              f"{row['unit']}{verdict(row)}")  # fmt: skip
    print(f"wrote {path}")
    return 0


def shown(number: float | str | None) -> str:
    if number is None:
        return "-"
    return number if isinstance(number, str) else f"{number:.4g}"


def verdict(row: dict[str, Any]) -> str:
    if row["met"] is None:
        return ""
    return f" (within {row['within']:g}: {'yes' if row['met'] else 'NO'})"


def progress(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """The items; a line on stderr, rewritten on a terminal, once three seconds have passed."""
    started = time.monotonic()
    for index, item in enumerate(items):
        if time.monotonic() - started > 3 and sys.stderr.isatty():
            print(f"\r\033[K{what}: {index}/{total}", end="", file=sys.stderr, flush=True)
        yield item
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
