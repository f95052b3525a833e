"""Groups of runs -> tables, each written once and rendered as Markdown and as HTML.

Numbers are right-aligned and carry their unit in the header; a missing value is an en dash.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

from topoep_titan.reports.summary import Group, Run, layer_series, mean, number

DASH = "\N{EN DASH}"
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

# As published, in the figure's caption and text.
PAPER = {
    "source": "TopoEP paper, Fig. 14",
    "setting": "Qwen3-30B-A3B, natural routing, TopoEP against Megatron-LM",
    "steps": 10_000,
    "mean_difference": 0.00088,
    "max_difference": 0.00407,
}


def text(value: Any) -> str:
    return str(value)


def count(value: float) -> str:
    return f"{value:,.0f}"


def fixed(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:,.{digits}f}"


def percent(value: float) -> str:
    return f"{100 * value:.2f}"


def small_percent(value: float) -> str:
    """Three significant digits: loss differences span many orders of magnitude."""
    if value == 0 or abs(value) >= 1e-5:
        return f"{100 * value:.3g}"
    mantissa, exponent = f"{100 * value:.2e}".split("e")
    return f"{mantissa}\N{MULTIPLICATION SIGN}10{str(int(exponent)).translate(SUPERSCRIPT)}"


@dataclass(frozen=True)
class Column:
    name: str
    form: Callable[[Any], str] = text
    unit: str = ""

    @property
    def header(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name

    def show(self, value: Any) -> str:
        return DASH if value is None else self.form(value)


@dataclass(frozen=True)
class Table:
    caption: str
    columns: list[Column]
    rows: list[list[Any]]  # values of each column; None is missing

    def to_markdown(self) -> str:
        def line(cells):
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

        rule = [":--" if column.form is text else "--:" for column in self.columns]
        body = [[c.show(value) for c, value in zip(self.columns, row)] for row in self.rows]
        lines = [[column.header for column in self.columns], rule, *body]
        return "\n".join([f"{self.caption}", "", *map(line, lines)])

    def to_html(self) -> str:
        """The container scrolls, not the page; ``data-value`` is what a click on a header sorts."""
        heads = "".join(
            f'<th scope="col"{_css(column)}><button type="button">{escape(column.name)}'
            + (f" <small>{escape(column.unit)}</small>" if column.unit else "")
            + "</button></th>"
            for column in self.columns
        )
        rows = "\n".join(f"<tr>{self._html_cells(row)}</tr>" for row in self.rows)
        return (
            f'<figure class="table"><figcaption>{escape(self.caption)}</figcaption>\n'
            f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(self.caption)}">'
            f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"
            "</figure>"
        )

    def _html_cells(self, row: list[Any]) -> str:
        cells = []
        for index, (column, value) in enumerate(zip(self.columns, row)):
            tag, scope = ("th", ' scope="row"') if index == 0 else ("td", "")
            data = "" if value is None else f' data-value="{escape(str(value))}"'
            cells.append(f"<{tag}{scope}{_css(column)}{data}>{escape(column.show(value))}</{tag}>")
        return "".join(cells)


def _css(column: Column) -> str:
    return "" if column.form is text else ' class="number"'


def balance_table(group: Group) -> Table:
    columns = [
        Column("run"),
        Column("steps", count),
        Column("max/mean before", fixed(3)),
        Column("max/mean after", fixed(3)),
        Column("across nodes", percent, "%"),
        Column("served by replicas", percent, "%"),
        Column("replicas per layer", fixed(2)),
        Column("median plan time", fixed(1), "µs"),
    ]
    rows = []
    for run in group.runs:
        s = run.summary
        balance = [s.max_over_mean_before, s.max_over_mean]
        traffic = [s.inter_node_fraction, s.replica_served_fraction]
        rows.append([run.label, s.steps, *balance, *traffic, s.replicas_per_layer, s.plan_us])
    caption = (
        "Balance and traffic. Max/mean is the busiest rank's load over the mean load (1 is ideal), "
        "before and after the plan; percentages are of (token, expert) assignments. Means over "
        "steps and MoE layers."
    )
    return Table(caption, columns, rows)


def training_table(group: Group) -> Table:
    compared = group.baseline is not None and len(group.runs) > 1
    columns = [
        Column("run"),
        Column("steps", count),
        Column("first loss", fixed(4)),
        Column("last loss", fixed(4)),
        Column("last validation loss", fixed(4)),
        Column("at step", count),
        Column("median tokens/s", count),
        *([Column("ratio to none", fixed(3))] if compared else []),
    ]
    rows = []
    for run in group.runs:
        s = run.summary
        ratio = run.comparison.speed_ratio if run.comparison else None
        if run is group.baseline and s.tokens_per_second:
            ratio = 1.0
        validated = run.result.validation[-1]["step"] if run.result.validation else None
        losses = [s.first_loss, s.last_loss, s.last_validation_loss, validated]
        ratios = [ratio] if compared else []
        rows.append([run.label, s.steps, *losses, s.tokens_per_second, *ratios])
    caption = "Training and speed. Losses in nats per token; tokens/s over all ranks"
    caption += ", the ratio to none on the steps that both runs have." if compared else "."
    return Table(caption, columns, rows)


def loss_table(group: Group) -> Table:
    """Each compared run, and the paper's published figures as the last row."""
    columns = [
        Column("run"),
        Column("compared steps", count),
        Column("bitwise equal", count),
        Column("mean difference", small_percent, "%"),
        Column("maximum difference", small_percent, "%"),
        Column("at step", count),
    ]
    rows = []
    for run in group.runs:
        if c := run.comparison:
            differences = [c.mean_difference, c.max_difference, c.max_difference_step]
            rows.append([run.label, c.compared_losses, c.bitwise_equal, *differences])
    published = [PAPER["mean_difference"], PAPER["max_difference"], None]
    rows.append([PAPER["source"], PAPER["steps"], None, *published])
    caption = (
        "Absolute relative difference of the training loss to none, step by step. The paper's row "
        f"is published, not measured here: {PAPER['setting']}."
    )
    return Table(caption, columns, rows)


def time_table(group: Group) -> Table | None:
    """The cost model's terms beside the measured ones; None when no run has either."""
    terms = ("compute", "token", "replica", "plan", "total")
    columns = [Column("run"), Column("time"), *(Column(term, fixed(1), "µs") for term in terms)]
    rows = [
        [run.label, kind, *(number(times.get(term)) for term in terms)]
        for run in group.runs
        for kind, times in (("modelled", run.result.modelled_us),
                            ("measured", run.result.measured_us))
        if times
    ]  # fmt: skip
    caption = "Time of one MoE layer and microbatch, forward and backward, by term."
    return Table(caption, columns, rows) if rows else None


def layer_table(group: Group) -> Table | None:
    keys = [
        ("max_over_mean_before", Column("max/mean before", fixed(3))),
        ("max_over_mean", Column("max/mean after", fixed(3))),
        ("inter_node_fraction", Column("across nodes", percent, "%")),
        ("replica_served_fraction", Column("served by replicas", percent, "%")),
        ("num_replicas", Column("replicas", fixed(2))),
        ("plan_us", Column("mean plan time", fixed(1), "µs")),
    ]
    columns = [Column("run"), Column("MoE layer", count), *(column for _, column in keys)]
    rows = []
    for run in group.runs:
        by_key = [layer_series(run.result, key) for key, _ in keys]
        for index, layer in enumerate(zip(*by_key)):
            rows.append([run.label, index, *(mean(values.values()) for values in layer)])
    caption = "Each MoE layer, counted from 0: means over the steps."
    return Table(caption, columns, rows) if rows else None


def settings_table(group: Group) -> Table | None:
    """The settings that are not the same in all runs of the group; None when all agree."""
    settings = [_flat(run.result.config) for run in group.runs]
    keys = sorted(set().union(*settings))
    rows = [
        [key, *(table.get(key) for table in settings)]
        for key in keys
        if any(table.get(key) != settings[0].get(key) for table in settings)
    ]
    columns = [Column("setting"), *(Column(run.label) for run in group.runs)]
    return Table("Settings in which the runs differ.", columns, rows) if rows else None


def conditions_table(runs: list[Run]) -> Table:
    columns = [Column(name) for name in ("run", "dispatcher", "commit", "versions", "hardware")]
    rows = [
        [run.label, run.result.dispatcher, run.result.commit or None,
         described(run.result.versions) or None, described(run.result.hardware) or None]
        for run in runs
    ]  # fmt: skip
    return Table("Where each run was made.", columns, rows)


def described(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} -> {"a.b": "1"}"""
    flat = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = json.dumps(value)
    return flat
