"""Groups of runs -> figures as SVG text, one function a figure.

Letters: L MoE layers, B bins of steps.
"""

import math
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from topoep_titan.reports.summary import Group, Run, layer_series, mean, series
from topoep_titan.reports.svg import INK, STYLE, svg_text

MAX_POINTS = 400  # of one curve; more steps are averaged in equal bins
PANEL = (4.7, 2.9)  # inches; one column of the page, and a phone's width

# Legible on white and on near-black alike; a planner keeps its colour in every report.
COLOURS = {
    "none": "#8a929c",
    "topoep": "#3b86d1",
    "joint": "#dd7330",
    "eplb": "#2fa37c",
    "fastermoe": "#a877c9",
    "flexmoe": "#bd9a1f",
    "ultraep": "#d4607f",
    "moonep": "#38aab5",
}


@dataclass(frozen=True)
class Figure:
    title: str
    caption: str  # what to see
    svg: str


def all_figures(group: Group) -> list[Figure]:
    """Those that the group has data for, in the page's order."""
    drawings = (training_loss, validation_loss, imbalance, layer_bars, traffic, throughput)
    with matplotlib.rc_context(STYLE):
        figures = [draw(group) for draw in drawings]
    return [figure for figure in figures if figure]


def heat_maps(group: Group) -> list[Figure]:
    with matplotlib.rc_context(STYLE):
        figures = [heat_map(group, run) for run in _planned(group)]
    return [figure for figure in figures if figure]


def training_loss(group: Group) -> Figure | None:
    losses = {run.label: series(run.result, "loss") for run in group.runs}
    if not any(losses.values()):
        return None
    compared = [run for run in group.runs if run.comparison and run.comparison.difference]
    width, height = PANEL
    canvas = Canvas((width, height + 1.4 if compared else height), layout="constrained")
    if compared:
        axes, below = canvas.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        bound = 0.0
        for run in compared:
            percentage = {step: 100 * d for step, d in run.comparison.difference.items()}
            _plot(below, percentage, _furthest, color=_colour(group, run))
            bound = max(bound, *map(abs, percentage.values()))
        below.axhline(0, color=_colour(group, group.baseline), linewidth=1, zorder=1)
        below.set_ylim(-1.1 * (bound or 1), 1.1 * (bound or 1))
        below.set_title("relative difference to none (%)")
    else:
        axes = below = canvas.subplots()
    for run in group.runs:
        # The baseline lies under the others, wide, so that curves on top of it can be seen.
        width = 4 if run is group.baseline and compared else 1.3
        _plot(axes, losses[run.label], label=run.label, color=_colour(group, run), linewidth=width)
    axes.set_title("training loss (nats per token)")
    _steps_axis(below)
    _legend(canvas, axes)
    caption = "Training loss of every run."
    if compared:
        caption += " Below, the signed difference to none: curves that lie on the line agree."
    binning = _binning(group)
    if compared and binning:
        binning += " Of a difference, the largest of these steps is shown."
    return _figure(canvas, group, "Training loss", caption + binning)


def validation_loss(group: Group) -> Figure | None:
    if not any(run.result.validation for run in group.runs):
        return None
    canvas = Canvas(PANEL, layout="constrained")
    axes = canvas.subplots()
    for run in group.runs:
        points = {point["step"]: point["loss"] for point in run.result.validation}
        baseline = run is group.baseline and len(group.runs) > 1
        style = {"linewidth": 4, "markersize": 7} if baseline else {"markersize": 3.5}
        style["marker"] = "o" if len(points) <= 40 else ""
        _plot(axes, points, label=run.label, color=_colour(group, run), **style)
    axes.set_title("validation loss (nats per token)")
    _steps_axis(axes)
    _legend(canvas, axes)
    return _figure(
        canvas, group, "Validation loss", "Loss on held-out text, where it was evaluated."
    )


def imbalance(group: Group) -> Figure | None:
    canvas = Canvas(PANEL, layout="constrained")
    axes = canvas.subplots()
    for run in group.runs:
        colour = _colour(group, run)
        _plot(axes, series(run.result, "max_over_mean"), label=run.label, color=colour)
        if run.result.planner != "none":
            before = series(run.result, "max_over_mean_before")
            _plot(axes, before, color=colour, linewidth=0.8, linestyle=(0, (2, 2)))
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.set_title("busiest rank / mean rank")
    _steps_axis(axes)
    _legend(canvas, axes)
    caption = (
        "Load of the busiest rank over the mean, averaged over the MoE layers: solid under the "
        "plan, dotted if every assignment ran on its main instance. The line at 1 is ideal."
    )
    return _figure(canvas, group, "Load imbalance", caption + _binning(group))


def layer_bars(group: Group) -> Figure | None:
    keys = ("max_over_mean_before", "max_over_mean")
    bars = {
        run.label: [[mean(v.values()) for v in layer_series(run.result, key)] for key in keys]
        for run in _planned(group)
    }
    runs = [run for run in _planned(group) if bars[run.label][0]]
    if not runs:
        return None
    canvas = Canvas((PANEL[0], PANEL[1] + 1.4 * (len(runs) - 1)), layout="constrained")
    panels = canvas.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, run in zip(panels, runs):
        before_L, after_L = (np.array(means, float) for means in bars[run.label])  # None -> NaN
        layer_L = np.arange(len(before_L))
        axes.bar(layer_L - 0.2, before_L, 0.38, color=COLOURS["none"])
        axes.bar(layer_L + 0.2, after_L, 0.38, color=_colour(group, run))
        axes.axhline(1, color=INK, linewidth=0.8)
        axes.set_title(f"{run.label}: busiest rank / mean rank")
        axes.grid(False, axis="x")
    panels[-1].set_xlabel("MoE layer")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    caption = (
        "Means over the steps: grey before the plan, coloured under it. The line at 1 is ideal."
    )
    return _figure(canvas, group, "Imbalance by layer", caption)


def traffic(group: Group) -> Figure | None:
    canvas = Canvas((PANEL[0], PANEL[1] + 1.0), layout="constrained")
    panels = canvas.subplots(2, 1, sharex=True)
    names = ("inter_node_fraction", "replica_served_fraction")
    titles = ("executed on another node (%)", "served by replicas (%)")
    for axes, name, title in zip(panels, names, titles):
        for run in group.runs:
            percentage = {step: 100 * value for step, value in series(run.result, name).items()}
            _plot(axes, percentage, label=run.label, color=_colour(group, run))
        axes.set_ylim(bottom=0)
        axes.set_title(title)
    _steps_axis(panels[1])
    _legend(canvas, panels[0])
    caption = (
        "Where assignments run: the share that leaves its node, and the share that a replica "
        "serves. Means over the MoE layers."
    )
    return _figure(canvas, group, "Traffic", caption + _binning(group))


def throughput(group: Group) -> Figure | None:
    if all(run.summary.tokens_per_second is None for run in group.runs):
        return None
    canvas = Canvas(PANEL, layout="constrained")
    axes = canvas.subplots()
    for run in group.runs:
        colour, middle = _colour(group, run), run.summary.tokens_per_second
        rates = series(run.result, "tokens_per_second")
        _plot(axes, rates, color=colour, linewidth=0, marker=".", markersize=3, alpha=0.7)
        if middle is not None:
            axes.axhline(middle, color=colour, label=run.label)
    axes.set_ylim(bottom=0)
    axes.set_title("tokens/s, all ranks")
    _steps_axis(axes)
    _legend(canvas, axes)
    caption = "Along the run; the lines are medians. A first step pays for warming up."
    return _figure(canvas, group, "Throughput", caption + _binning(group))


def heat_map(group: Group, run: Run) -> Figure | None:
    """Before and after on one scale, which is the same for all runs of the group."""
    before_LB, after_LB = (_grid(run, key) for key in ("max_over_mean_before", "max_over_mean"))
    if not before_LB.size:
        return None
    shown = [_grid(other, key) for other in _planned(group) for key in
             ("max_over_mean_before", "max_over_mean")]  # fmt: skip
    top = max((float(np.nanmax(grid)) for grid in shown if np.isfinite(grid).any()), default=1.0)
    steps = [step["step"] for step in run.result.steps]
    canvas = Canvas((PANEL[0], PANEL[1] + 0.6), layout="constrained")
    panels = canvas.subplots(2, 1, sharex=True)
    for axes, grid_LB, title in zip(panels, (before_LB, after_LB), ("before", "after")):
        image = axes.imshow(
            grid_LB, aspect="auto", interpolation="none", cmap="cividis", origin="upper",
            vmin=1.0, vmax=max(top, 1.01),
            extent=(min(steps) - 0.5, max(steps) + 0.5, len(grid_LB) - 0.5, -0.5),
        )  # fmt: skip
        axes.grid(False)
        axes.set_title(title)
        axes.set_ylabel("MoE layer")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    _steps_axis(panels[1])
    bar = canvas.colorbar(image, ax=list(panels), aspect=30, fraction=0.05, pad=0.02)
    bar.outline.set_visible(False)
    bar.set_label("max/mean")
    caption = (
        "Busiest rank over mean rank, by MoE layer and step. Dark is balanced; the scale is shared "
        "by the runs."
    )
    return _figure(canvas, group, run.label, caption + _binning(group))


def _planned(group: Group) -> list[Run]:
    """The runs whose plan moves something; a baseline alone is shown all the same."""
    return [run for run in group.runs if run.result.planner != "none"] or group.runs


def _colour(group: Group, run: Run) -> str:
    """The planner's own; a second run of a planner takes the next colour that is free."""
    palette, taken = list(COLOURS.values()), {}
    planners = {other.result.planner for other in group.runs}
    free = [colour for planner, colour in COLOURS.items() if planner not in planners]
    for index, other in enumerate(group.runs):
        own = COLOURS.get(other.result.planner)
        if own is None or own in taken.values():
            own = free.pop(0) if free else palette[index % len(palette)]
        taken[other.label] = own
    return taken[run.label]


def _binning(group: Group) -> str:
    size = max(math.ceil(run.summary.steps / MAX_POINTS) for run in group.runs)
    return f" A point is the mean of up to {size} steps." if size > 1 else ""


def _furthest(values: list[float]) -> float:
    return max(values, key=abs)


def _grid(run: Run, key: str) -> np.ndarray:
    """(L, B) means over equal ranges of step numbers; NaN (blank) where nothing was recorded."""
    layers = layer_series(run.result, key)
    first, last = (pick(step["step"] for step in run.result.steps) for pick in (min, max))
    size = math.ceil((last - first + 1) / MAX_POINTS)
    grid_LB = np.full((len(layers), math.ceil((last - first + 1) / size)), np.nan)
    for row_B, values in zip(grid_LB, layers):
        bins: dict[int, list[float]] = {}
        for step, value in values.items():
            bins.setdefault((step - first) // size, []).append(value)
        for index, members in bins.items():
            row_B[index] = mean(members)
    return grid_LB


def _plot(axes, values: dict[int, float], reduce=mean, **style) -> None:
    """At most MAX_POINTS points, each ``reduce`` of equally many values."""
    steps, size = list(values), max(math.ceil(len(values) / MAX_POINTS), 1)
    bins = [steps[start : start + size] for start in range(0, len(steps), size)]
    # One step makes no line: show it as a point.
    marker = {"marker": "o", "markersize": 4} if len(bins) == 1 else {}
    y = [reduce([values[step] for step in members]) for members in bins]
    axes.plot([mean(members) for members in bins], y, **{**marker, **style})


def _steps_axis(axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(
        MaxNLocator(integer=True, nbins=7, min_n_ticks=1, steps=[1, 2, 5, 10])
    )


def _legend(canvas: Canvas, axes) -> None:
    """Outside, above the panels: it never hides a curve."""
    handles, labels = axes.get_legend_handles_labels()
    columns = min(len(labels), 4)
    canvas.legend(handles, labels, loc="outside upper left", ncols=columns, borderaxespad=0)


def _figure(canvas: Canvas, group: Group, title: str, caption: str) -> Figure:
    salt = f"{group.recipe}, {group.setting}: {title}"
    return Figure(title, caption, svg_text(canvas, salt=salt, label=f"{title}. {caption}"))
