"""Runs -> the numbers of a report: every mean, median, ratio and difference is taken here.

A run with planner ``none`` is the baseline of the runs that share its kind, recipe, routing and
number of ranks. A value that a run does not have is None, never NaN.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from topoep_titan.errors import InputError
from topoep_titan.results import RunResult


@dataclass(frozen=True)
class Summary:
    """One run. Fractions are of assignments; means are over all its steps (and layers)."""

    steps: int
    first_loss: float | None
    last_loss: float | None
    last_validation_loss: float | None
    max_over_mean_before: float | None
    max_over_mean: float | None
    inter_node_fraction: float | None
    replica_served_fraction: float | None
    replicas_per_layer: float | None
    tokens_per_second: float | None  # median of the steps, over all ranks
    plan_us: float | None  # median of the layers and steps, measured
    non_finite_losses: int  # steps whose loss is NaN or infinite


@dataclass(frozen=True)
class Comparison:
    """A run beside its baseline, on the steps that both have."""

    common_steps: int
    speed_ratio: float | None  # median tokens/s over the baseline's median
    compared_losses: int  # common steps on which both have a loss
    bitwise_equal: int  # of these, steps with the same loss_hex
    mean_difference: float | None  # of |loss - baseline| / baseline
    max_difference: float | None
    max_difference_step: int | None
    difference: dict[int, float]  # step -> signed relative difference


@dataclass(frozen=True)
class Run:
    label: str  # its name, unique within the group
    result: RunResult
    summary: Summary
    comparison: Comparison | None  # None for the baseline, and where there is none


@dataclass(frozen=True)
class Group:
    """Runs that may be compared. The baseline, if any, comes first."""

    kind: str
    recipe: str
    routing: str
    ranks: int
    runs: list[Run]

    @property
    def baseline(self) -> Run | None:
        first = self.runs[0]
        return first if first.result.planner == "none" else None

    @property
    def shares_cores(self) -> bool:
        """Measured by more ranks than one machine has cores: tokens/s mean nothing then."""
        first = self.runs[0].result
        cores = first.hardware.get("cores") or math.inf
        machines = first.hardware.get("machines") or 1
        return self.kind == "measured" and first.ranks > cores * machines

    @property
    def setting(self) -> str:
        routing = "natural" if self.routing == "natural" else f"synthetic ({self.routing})"
        return f"{routing} routing, {self.ranks} ranks, {self.kind}"


def group_runs(results: list[RunResult]) -> list[Group]:
    """Raises InputError for no results and for a run without steps."""
    if not results:
        raise InputError("no results to report; give at least one run")
    alike: dict[tuple, list[RunResult]] = {}  # recipes that build on the same base are compared
    for result in results:
        if not result.steps:
            raise InputError(
                f"the {result.planner!r} run of {result.recipe} has no steps; "
                "leave it out, or let it train"
            )
        base = result.config.get("base", result.recipe)
        key = (result.kind, base, result.routing, result.ranks)
        alike.setdefault(key, []).append(result)
    groups = []
    for (kind, base, routing, ranks), members in alike.items():
        recipes = {member.recipe for member in members}
        recipe = recipes.pop() if len(recipes) == 1 else base
        groups.append(Group(kind, recipe, routing, ranks, _compared(members)))
    return groups


def number(value: Any) -> float | None:
    """A finite number, or None."""
    return value if value is not None and math.isfinite(value) else None


def series(result: RunResult, key: str) -> dict[int, float]:
    """step -> value, of the steps that have one. A step written twice counts once, as last seen."""
    values = {step["step"]: number(step[key]) for step in result.steps}
    return {step: values[step] for step in sorted(values) if values[step] is not None}


def layer_series(result: RunResult, key: str) -> list[dict[int, float]]:
    """``series`` of each MoE layer; empty when the run recorded no layers."""
    layers = max(len(step["layers"] or []) for step in result.steps)
    found: list[dict[int, float]] = [{} for _ in range(layers)]
    for step in result.steps:
        for values, layer in zip(found, step["layers"] or []):
            if number(layer.get(key)) is not None:
                values[step["step"]] = layer[key]
    return found


def mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return fmean(values) if values else None


def _compared(results: list[RunResult]) -> list[Run]:
    results = sorted(results, key=lambda result: result.planner != "none")  # stable
    baseline = results[0] if results[0].planner == "none" else None
    return [
        Run(
            label,
            result,
            _summarize(result),
            _compare(result, baseline) if baseline and result is not baseline else None,
        )
        for label, result in zip(_labels(results), results)
    ]


def _labels(results: list[RunResult]) -> list[str]:
    """The run's name, with the planner where several are compared; what lacks a name has its
    planner, with the dispatcher and then a number where it is not unique."""
    names = [result.name or result.planner for result in results]
    full = [
        f"{name} ({result.planner})" if name != result.planner and len(results) > 1
        else name if names.count(name) == 1 or result.name else f"{name} ({result.dispatcher})"
        for name, result in zip(names, results)
    ]  # fmt: skip
    return [
        name if full.count(name) == 1 else f"{name} #{full[: index + 1].count(name)}"
        for index, name in enumerate(full)
    ]


def _summarize(result: RunResult) -> Summary:
    losses = list(series(result, "loss").values())
    validation = [number(point["loss"]) for point in result.validation]
    means = {
        key: mean(series(result, key).values())
        for key in (
            "max_over_mean_before",
            "max_over_mean",
            "inter_node_fraction",
            "replica_served_fraction",
        )
    }
    return Summary(
        steps=len({step["step"] for step in result.steps}),
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        last_validation_loss=validation[-1] if validation else None,
        **means,
        replicas_per_layer=mean(_over_layers(result, "num_replicas")),
        tokens_per_second=_median(series(result, "tokens_per_second").values()),
        plan_us=_median(_over_layers(result, "plan_us")),
        non_finite_losses=sum(
            step["loss"] is not None and number(step["loss"]) is None for step in result.steps
        ),
    )


def _compare(result: RunResult, baseline: RunResult) -> Comparison:
    common = {step["step"] for step in result.steps} & {step["step"] for step in baseline.steps}
    speed, base_speed = (series(run, "tokens_per_second") for run in (result, baseline))
    loss, base_loss = series(result, "loss"), series(baseline, "loss")
    both = sorted(step for step in loss.keys() & base_loss.keys() if base_loss[step])
    difference = {step: (loss[step] - base_loss[step]) / base_loss[step] for step in both}
    absolute = {step: abs(value) for step, value in difference.items()}
    bits, base_bits = (
        {step["step"]: step["loss_hex"] for step in run.steps} for run in (result, baseline)
    )
    worst = max(absolute, key=absolute.get, default=None)
    return Comparison(
        common_steps=len(common),
        speed_ratio=_median_ratio(speed, base_speed),
        compared_losses=len(both),
        bitwise_equal=sum(
            bits[step] is not None and bits[step] == base_bits[step] for step in both
        ),
        mean_difference=mean(absolute.values()),
        max_difference=None if worst is None else absolute[worst],
        max_difference_step=worst,
        difference=difference,
    )


def _over_layers(result: RunResult, key: str) -> list[float]:
    return [value for layer in layer_series(result, key) for value in layer.values()]


def _median(values: Iterable[float]) -> float | None:
    values = list(values)
    return median(values) if values else None


def _median_ratio(values: dict[int, float], base: dict[int, float]) -> float | None:
    """Of the steps that both have."""
    both = values.keys() & base.keys()
    return median(values[s] for s in both) / median(base[s] for s in both) if both else None
