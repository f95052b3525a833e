"""Runs -> one report: a self-contained HTML page, its content as Markdown, its numbers as JSON.

The content is a list of blocks, written once and rendered by ``blocks``.
"""

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from topoep_titan.reports import tables
from topoep_titan.reports.blocks import Block, Code, Heading, Paragraph, Steps, write_page
from topoep_titan.reports.figures import MAX_POINTS, all_figures, heat_maps
from topoep_titan.reports.published import Answer, folded_answers
from topoep_titan.reports.summary import Group, Run, group_runs, layer_series, number
from topoep_titan.reports.tables import PAPER
from topoep_titan.results import RunResult, read_result

RANK_LOADS = (("rank_load_before", "before the plan"), ("rank_load", "under the plan"))
MAX_NUMBERS = 100_000  # of one slider: half a megabyte of the page


def report_command(run_dirs: list[Path], out_dir: Path) -> Path:
    """``topoep report RUN... --out OUT``: read each RUN/result.json, write the report.

    A folder of runs (such as outputs/reproduce-qwen) stands for the runs in it. Returns the HTML
    path. Raises InputError for a run without a readable result, for no runs at all, and when
    ``out_dir`` cannot be written.
    """
    results = [read_result(path) for run in run_dirs for path in _results(Path(run))]
    recipes = list(dict.fromkeys(Path(result.recipe).stem for result in results))
    command = shlex.join(["topoep", "report", *map(str, run_dirs), "--out", str(out_dir)])
    return write_report(results, out_dir, title=", ".join(recipes), command=command)


def _results(folder: Path) -> list[Path]:
    own = folder / "result.json"
    return [own] if own.exists() else sorted(folder.glob("*/result.json")) or [own]


def write_report(
    results: list[RunResult],
    out_dir: Path,
    *,
    title: str,
    command: str,
    answers: Sequence[Answer] = (),
) -> Path:
    """Write ``report.html``, ``report.md`` and ``results.json``; return the HTML path.

    A run with planner ``none`` is the baseline of the other runs of its kind, recipe, routing and
    number of ranks. ``command`` is what the page names as its reproduction; ``answers``
    to the papers' questions follow in a folded part of their own. Equal input gives equal bytes.
    Raises InputError for no results, a run without steps, and an unwritable ``out_dir``; nothing is
    written before everything is rendered.
    """
    groups = group_runs(results)
    blocks = _content(groups, command) + ([folded_answers(list(answers))] if answers else [])
    numbers = {"title": title, "command": command, **_numbers(groups)}
    text = json.dumps(numbers, indent=1, allow_nan=False) + "\n"
    return write_page(out_dir, "report", title, blocks, results_json=text)


def _content(groups: list[Group], command: str) -> list[Block]:
    blocks: list[Block] = [Paragraph(_summary(group)) for group in groups]
    for group in groups:
        suffix = f": {group.recipe}, {group.setting}" if len(groups) > 1 else ""
        blocks += [Heading("Runs" + suffix), *map(Paragraph, _notes(group))]
        blocks += [tables.balance_table(group), tables.training_table(group)]
        blocks += [tables.time_table(group)]
        if group.routing == "natural" and any(_compares_losses(run) for run in group.runs):
            blocks += [Heading("Loss equivalence" + suffix), tables.loss_table(group)]
        blocks += [Heading("Figures" + suffix), all_figures(group)]
        if maps := heat_maps(group):
            blocks += [Heading("Imbalance by layer and step" + suffix), maps]
            planned = [run for run in group.runs if run.result.planner != "none"] or group.runs
            blocks += [_steps_of(run) for run in planned]
            blocks += [_ranks_of(run, *named) for run in planned for named in RANK_LOADS]
        if layers := tables.layer_table(group):
            blocks += [Heading("Layers" + suffix), layers]
    runs = [run for group in groups for run in group.runs]
    blocks += [Heading("Conditions"), tables.conditions_table(runs)]
    blocks += [tables.settings_table(group) for group in groups]
    for group in groups:
        for run in group.runs:
            name = f"Resolved configuration of {run.label} ({group.recipe}, {group.setting})"
            blocks.append(Code(json.dumps(run.result.config, indent=1, sort_keys=True), name))
    blocks += [Paragraph("This command writes the page again:"), Code(command)]
    return [block for block in blocks if block]


def _ranks_of(run: Run, key: str, name: str) -> Steps | None:
    """The load of every rank in every layer; None for a run that did not record it."""
    recorded = {
        step["step"]: [layer[key] for layer in step["layers"]]
        for step in run.result.steps
        if step["layers"] and all(key in layer for layer in step["layers"])
    }
    if not recorded:
        return None
    layers, ranks = np.shape(next(iter(recorded.values())))
    most = min(MAX_POINTS, max(1, MAX_NUMBERS // (layers * ranks)))
    steps = sorted(recorded)
    steps = steps[:: -(-len(steps) // most)]
    rows = {
        f"rank {rank}": [[recorded[s][layer][rank] for s in steps] for layer in range(layers)]
        for rank in range(ranks)
    }
    return Steps(f"{run.label}: load of each rank over the mean rank, {name}", steps, rows)


def _steps_of(run: Run) -> Steps | None:
    """Max/mean of each layer before and under the plan, of up to 400 steps evenly spread."""
    keys = {"before": "max_over_mean_before", "under the plan": "max_over_mean"}
    found = {name: layer_series(run.result, key) for name, key in keys.items()}
    if not all(found.values()):
        return None
    steps = sorted({step["step"] for step in run.result.steps})
    steps = steps[:: -(-len(steps) // MAX_POINTS)]
    rows = {
        name: [[layer.get(step) for step in steps] for layer in layers]
        for name, layers in found.items()
    }
    return Steps(f"{run.label}: busiest rank over mean rank", steps, rows)


def _summary(group: Group) -> str:
    """What was run, on what, and each run's main numbers, in one paragraph."""
    first = group.runs[0].result
    made_on = [tables.described(first.hardware), tables.described(first.versions)]
    made_on += [f"commit `{first.commit}`"] if first.commit else []
    conditions = "; ".join(part for part in made_on if part) or "unknown hardware"
    others = [run for run in group.runs if run is not group.baseline]
    sentences = [_sentence(group, run) for run in others or group.runs]
    return " ".join([f"`{group.recipe}`, {group.setting}.", *sentences, f"On: {conditions}."])


def _sentence(group: Group, run: Run) -> str:
    s, c = run.summary, run.comparison
    base = group.baseline.summary if c else None
    clauses = []
    if s.max_over_mean is not None and s.max_over_mean_before is not None:
        clauses.append(
            f"busiest rank at {s.max_over_mean:.2f} times the mean load, "
            f"{s.max_over_mean_before:.2f} before the plan"
        )
    if s.inter_node_fraction is not None:
        known = base and base.inter_node_fraction is not None
        beside = f" (`none`: {100 * base.inter_node_fraction:.1f} %)" if known else ""
        clauses.append(f"{100 * s.inter_node_fraction:.1f} % of assignments cross nodes{beside}")
    if group.shares_cores:
        pass  # the notes say why there is no speed
    elif c and c.speed_ratio is not None:
        clauses.append(f"{c.speed_ratio:.3f} times the tokens/s of `none`")
    elif s.tokens_per_second is not None:
        clauses.append(f"median {s.tokens_per_second:,.0f} tokens/s")
    if group.routing == "natural" and _compares_losses(run):
        clauses.append(
            f"training loss within {tables.small_percent(c.max_difference)} % of `none` at every "
            f"step, bitwise equal on {c.bitwise_equal:,} of {c.compared_losses:,}"
        )
    return f"`{run.label}` over {_steps(s.steps)}: {'; '.join(clauses)}." if clauses else ""


def _notes(group: Group) -> list[str]:
    """What a reader must know before comparing: everything that is not alike."""
    notes = []
    for run in group.runs:
        c = run.comparison
        longest = max(run.summary.steps, group.runs[0].summary.steps)
        if c and c.common_steps < longest:
            notes.append(
                f"`{run.label}` has {_steps(run.summary.steps)} and `none` "
                f"{group.runs[0].summary.steps:,}: ratios and loss differences are taken on the "
                f"{_steps(c.common_steps)} that both have."
            )
        if run.summary.non_finite_losses:
            notes.append(
                f"The loss of `{run.label}` is not finite on "
                f"{_steps(run.summary.non_finite_losses)}, left out of every number and curve."
            )
    first = group.runs[0].result
    if group.shares_cores:
        notes.append(
            f"Tokens/s are no result here: {first.ranks} ranks share {first.hardware['cores']} "
            "cores, which lend idle time to the busiest."
        )
    per_node = first.config.get("topoep", {}).get("ranks_per_node")
    if first.hardware.get("machines") == 1 and per_node and per_node < first.ranks:
        notes.append(
            f"Nodes are emulated: all {first.ranks} ranks run on one machine, {per_node} to a "
            "node, so what crosses nodes is counted, and costs no more than what does not."
        )
    if group.routing != "natural" and group.baseline and len(group.runs) > 1:
        notes.append(
            "Routing is synthetic and the router gets no gradient, so training losses are not "
            "compared."
        )
    for field in ("commit", "versions", "hardware"):
        if any(getattr(run.result, field) != getattr(group.runs[0].result, field)
               for run in group.runs):  # fmt: skip
            notes.append(f"The runs differ in their {field}; see the conditions below.")
    return notes


def _steps(count: int) -> str:
    return f"{count:,} step" + ("s" if count != 1 else "")


def _compares_losses(run: Run) -> bool:
    return run.comparison is not None and run.comparison.compared_losses > 0


def _numbers(groups: list[Group]) -> dict:
    runs = []
    for group in groups:
        for run in group.runs:
            entry = {"label": run.label, **dataclasses.asdict(run.result)}
            for bulky in ("steps", "validation", "config"):
                del entry[bulky]
            for times in ("modelled_us", "measured_us"):
                entry[times] = {k: number(v) for k, v in (entry[times] or {}).items()} or None
            entry["summary"] = dataclasses.asdict(run.summary)
            entry["compared_with_none"] = None
            if run.comparison:
                entry["compared_with_none"] = dataclasses.asdict(run.comparison)
                del entry["compared_with_none"]["difference"]
            runs.append(entry)
    return {"runs": runs, "paper": PAPER}
