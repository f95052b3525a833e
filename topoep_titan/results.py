"""RunResult: what every run, measured or simulated, leaves behind in ``result.json``.

The one door between runs and reports. Plain JSON values only, so that reading one needs no torch.
"""

import dataclasses
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from topoep_titan.errors import InputError

STEP_KEYS = (
    "step",
    "loss",
    "loss_hex",  # float.hex() of the loss: equal strings mean bitwise equal losses
    "seconds",
    "tokens_per_second",  # over all ranks
    "max_over_mean_before",  # busiest over mean rank load if every assignment ran on its main
    "max_over_mean",  # the same under the plan
    "inter_node_fraction",  # of assignments: executed on another node than their source's
    "replica_served_fraction",  # of assignments: executed in a replica slot
    "layers",  # LAYER_KEYS of each MoE layer, in the model's order
)
LAYER_KEYS = (
    "max_over_mean_before",
    "max_over_mean",
    "inter_node_fraction",
    "replica_served_fraction",
    "num_replicas",  # occupied replica slots over all ranks
    "plan_us",  # measured planning time; None where no planner ran
)
# A training run's layers also hold, for each rank over the mean rank: "rank_load_before" and
# "rank_load".


@dataclass(frozen=True)
class RunResult:
    """Step values are means over the MoE layers; ``steps[i]["layers"]`` holds each layer's."""

    kind: Literal["measured", "simulated"]
    recipe: str
    planner: str
    dispatcher: str
    routing: str  # "natural" or "skew -4"
    ranks: int
    steps: list[dict[str, Any]]  # STEP_KEYS each
    name: str = ""  # of the run: its folder under outputs/
    validation: list[dict[str, float]] = field(default_factory=list)  # {step, loss}
    modelled_us: dict[str, float] | None = None  # compute, token, replica, plan, total
    measured_us: dict[str, float] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    commit: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)


def write_result(result: RunResult, path: Path) -> None:
    """Write the whole file or nothing."""
    write_atomically(path, json.dumps(dataclasses.asdict(result), indent=1) + "\n")


def read_result(path: Path) -> RunResult:
    """Raises InputError when the file is missing, not JSON, or not a RunResult."""
    try:
        result = RunResult(**json.loads(path.read_text()))
        _check_head(result)
        for step in result.steps:
            _check_step(step)
        return result
    except OSError as error:
        raise InputError(
            f"no result at {path} ({error.strerror}); a finished run writes result.json"
        ) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a RunResult: {error}") from None


_JSON_TYPES = {
    "kind": str, "recipe": str, "planner": str, "dispatcher": str, "routing": str, "ranks": int,
    "steps": list, "name": str, "validation": list, "config": dict, "versions": dict,
    "hardware": dict,
}  # fmt: skip


def _check_head(result: RunResult) -> None:
    for name, expected in _JSON_TYPES.items():
        _check(isinstance(getattr(result, name), expected), name, getattr(result, name))
    _check(result.kind in ("measured", "simulated"), "kind", result.kind)
    _check(type(result.ranks) is int and result.ranks > 0, "ranks", result.ranks)
    topoep = result.config.get("topoep", {})
    _check(isinstance(topoep, dict), "config.topoep", topoep)
    per_node = topoep.get("ranks_per_node")
    _check(type(per_node) in (int, type(None)), "config.topoep.ranks_per_node", per_node)
    _check(isinstance(result.config.get("base", ""), str), "config.base", result.config.get("base"))
    for name in ("modelled_us", "measured_us"):
        times = getattr(result, name)
        _check(isinstance(times, dict | None), name, times)
        _check_numbers(times or {}, tuple(times or {}))
    for point in result.validation:
        _check(isinstance(point, dict) and "loss" in point, "validation", point)
        _check_numbers(point, tuple(point))


def _check_step(step: dict[str, Any]) -> None:
    missing = [key for key in STEP_KEYS if key not in step]
    if missing:
        raise TypeError(f"step {step.get('step')} lacks {', '.join(missing)}")
    _check(type(step["step"]) is int, "step", step["step"])
    _check(isinstance(step["loss_hex"], str | None), "loss_hex", step["loss_hex"])
    _check(isinstance(step["layers"], list), "layers", step["layers"])
    _check_numbers(step, STEP_KEYS)
    for layer in step["layers"]:
        _check_numbers(layer, LAYER_KEYS)
        for name in ("rank_load_before", "rank_load"):
            loads, beside = (each.get(name, []) for each in (layer, step["layers"][0]))
            good = isinstance(loads, list) and len(loads) == len(beside)
            _check(good, name, loads)
            _check_numbers(dict(enumerate(loads)), tuple(range(len(loads))))


def _check_numbers(table: dict, keys: tuple) -> None:
    for key in keys:
        value = table.get(key)
        if key not in ("loss_hex", "layers"):
            # JSON knows integers of any size; those beyond float64 are no number of a run.
            huge = type(value) is int and abs(value) > sys.float_info.max
            _check(isinstance(value, int | float | None) and not huge, str(key), value)


def _check(good: bool, name: str, value: Any) -> None:
    if not good:
        raise TypeError(f"{name} is {value!r:.60}")


def write_atomically(path: Path, content: str | bytes) -> None:
    """A reader sees the old file or the new one, whole, also after a crash.

    Raises InputError for a path that is there and no regular file (a device, a folder).
    """
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a regular file; choose another path")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def provenance() -> dict[str, Any]:
    """``commit``, ``versions`` and ``hardware`` of this process, for a RunResult."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "torchtitan", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "absent"
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    hardware = {"machine": platform.machine(), "processor": _processor(), "cores": os.cpu_count()}
    return {"commit": git.stdout.strip() or "unknown", "versions": versions, "hardware": hardware}


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
