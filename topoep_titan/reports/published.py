"""Answers to the papers' questions (JSON of the reproduction programs) -> one page.

An answer: ``figure, question, kind, conditions, command, seconds, commit``; ``values`` of ``what,
published, ours, unit, within, met, why``; ``tables`` of ``caption, columns, rows``; ``curves`` of
``panel, label, x, y, published`` with ``axes``; and ``bars`` of ``lane, label, start, end`` (ms).
"""

import json
import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure as Canvas

from topoep_titan.errors import InputError
from topoep_titan.reports.blocks import Block, Folded, Heading, Paragraph, write_page
from topoep_titan.reports.figures import COLOURS, Figure
from topoep_titan.reports.svg import INK, STYLE, svg_text
from topoep_titan.reports.tables import Column, Table, text

Answer = dict[str, Any]
REQUIRED = ("figure", "question", "kind", "conditions", "command", "values", "tables", "curves")
SPARE = ("#3b86d1", "#dd7330", "#2fa37c", "#a877c9", "#bd9a1f", "#d4607f", "#38aab5", "#8a929c")
PANEL_INCHES = (4.7, 2.6)


def read_answers(folder: Path) -> list[Answer]:
    """Every ``*.json`` of a folder, tables first, then by paper and number.

    Raises InputError for a file that is no answer.
    """
    answers = []
    for path in sorted(Path(folder).glob("*.json")):
        try:
            answer = json.loads(path.read_text())
            missing = [key for key in REQUIRED if key not in answer]
        except (OSError, json.JSONDecodeError, TypeError) as error:
            raise InputError(f"{path} is not an answer: {error}; run its program again") from None
        if missing:
            raise InputError(f"{path} lacks {', '.join(missing)}; run its program again")
        answers.append(answer)
    return sorted(answers, key=_order)


def write_answers(answers: list[Answer], out_dir: Path, *, title: str) -> Path:
    """``report.html`` and ``report.md``. Raises InputError when there is nothing to write."""
    if not answers:
        raise InputError("no answers to report; run `make figures`")
    return write_page(out_dir, "report", title, answer_blocks(answers))


def answer_blocks(answers: list[Answer]) -> list[Block]:
    """An overview table, then one section an answer."""
    columns = [Column("what"), *_VALUES, Column("figure"), Column("kind")]
    rows = [
        [v["what"], *_value_cells(v), a["figure"], a["kind"]]
        for a in answers
        for v in a["values"]
        if v["within"]  # 0: an identity, such as a table's entries
    ]
    blocks: list[Block] = [
        Paragraph(
            "What the papers publish beside what this repository computes, simulates or measures. "
            "Published values are theirs; a band is what was agreed before the number was known."
        )
    ]
    if rows:
        blocks.append(Table("All values with an agreed band.", columns, rows))
    for answer in answers:
        blocks += [
            Heading(answer["figure"]),
            Paragraph(f"{answer['question']} ({answer['kind']})"),
            Paragraph(f"Conditions: {answer['conditions']}"),
            _values_table(answer),
        ]
        if figures := answer_figures(answer):
            blocks.append(figures)
        blocks += [_table(table) for table in answer["tables"]]
        blocks.append(Paragraph(f"`{answer['command']}`, commit `{answer.get('commit', '')}`."))
    return blocks


def folded_answers(answers: list[Answer]) -> Folded:
    """What the repository answers beside a run, said to be no part of it."""
    notice = Paragraph(
        "Nothing here was made by the run above. These are this repository's committed results, "
        "each simulated or measured by the commit named with it; `make figures` makes them again."
    )
    columns = [Column("figure"), Column("question"), Column("kind"), Column("value"),
               Column("published", short), Column("ours", short), Column("unit"),
               Column("commit")]  # fmt: skip
    rows = []
    for a in answers:
        first = next((v for v in a["values"] if v["within"]), next(iter(a["values"]), None))
        named = ("what", "published", "ours", "unit")
        cells = [first[name] or None for name in named] if first else [None] * len(named)
        rows.append([a["figure"], a["question"], a["kind"], *cells, a.get("commit") or None])
    table = Table("One value of each figure and table; all are in `report.html`.", columns, rows)
    return Folded(
        f"The papers' figures and tables ({len(answers)}), not from this run",
        [notice, *answer_blocks(answers)],
        [notice, table],
    )


def answer_figures(answer: Answer) -> list[Figure]:
    with matplotlib.rc_context(STYLE):
        panels = list(dict.fromkeys(curve["panel"] for curve in answer["curves"]))
        figures = [_panel(answer, panel) for panel in panels]
        if answer.get("bars"):
            figures.append(_timeline(answer))
    return figures


def _panel(answer: Answer, panel: str) -> Figure:
    canvas = Canvas(PANEL_INCHES, layout="constrained")
    axes = canvas.subplots()
    curves = [curve for curve in answer["curves"] if curve["panel"] == panel]
    spare = iter(SPARE)
    for curve in curves:
        name = curve["label"].split(",")[0].split()[0]
        colour = COLOURS.get(name) or ("#5b6570" if name == "megatron" else next(spare, INK))
        # A published value is a star, or stars joined by dots: nothing is drawn between them.
        style = (
            {"marker": "*", "markersize": 8, "linestyle": (0, (1, 2)), "linewidth": 0.8}
            if curve["published"]
            else {"marker": "o", "markersize": 3}
        )
        axes.plot(curve["x"], curve["y"], color=colour, label=curve["label"], **style)
    x_name, y_name = answer.get("axes", ["", ""])
    if all(x > 0 for curve in curves for x in curve["x"]) and _spread(curves) > 10:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for curve in curves for x in curve["x"]})
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks], fontsize=7)
        axes.minorticks_off()
    values = [y for curve in curves for y in curve["y"] if y is not None]
    if min(values) > 0 and max(values) > 50 * min(values):
        axes.set_yscale("log")
    axes.set_xlabel(x_name)
    axes.set_title(y_name)
    canvas.legend(loc="outside upper left", ncols=3, fontsize=8)
    title = panel or answer["figure"]
    caption = "Stars are published values." if any(c["published"] for c in curves) else ""
    label = f"{answer['figure']}, {title}: {answer['question']}"
    return Figure(title, caption, svg_text(canvas, salt=label, label=label))


def _timeline(answer: Answer) -> Figure:
    bars = answer["bars"]
    lanes = list(dict.fromkeys(bar["lane"] for bar in bars))
    canvas = Canvas((5.6, 0.5 * len(lanes) + 0.9), layout="constrained")
    axes = canvas.subplots()
    kinds = {"expert": "#dd7330", "dgrad": "#dd7330", "wgrad": "#bd9a1f", "dispatch": "#3b86d1",
             "combine": "#38aab5", "attention": "#8a929c"}  # fmt: skip
    longest = max(bar["end"] for bar in bars)
    for bar in bars:
        length = bar["end"] - bar["start"]
        kind = re.sub(r"\d+$", "", bar["label"])
        row = lanes.index(bar["lane"])
        axes.barh(row, length, left=bar["start"], height=0.7, color=kinds.get(kind, "#a877c9"))
        if length > 0.06 * longest:
            axes.text(bar["start"] + length / 2, row, bar["label"], ha="center", va="center",
                      fontsize=5)  # fmt: skip
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_xlabel("milliseconds")
    label = f"{answer['figure']}: {answer['question']}"
    caption = "One layer, forward then backward, on one rank."
    return Figure("Timeline", caption, svg_text(canvas, salt=label, label=label))


def short(number: Any) -> str:
    """Four significant digits, or the text that stands for a number."""
    if isinstance(number, bool):
        return "yes" if number else "no"
    return f"{number:,.4g}" if isinstance(number, (int, float)) else str(number)


_VALUES = [
    Column("published", short),
    Column("ours", short),
    Column("unit"),
    Column("band", short),
    Column("within"),
]


def _value_cells(value: dict[str, Any]) -> list[Any]:
    met = {None: None, True: "yes", False: "no"}[value["met"]]
    return [value["published"], value["ours"], value["unit"] or None, value["within"], met]


def _values_table(answer: Answer) -> Table:
    columns = [Column("what"), *_VALUES, Column("why they differ")]
    rows = [[v["what"], *_value_cells(v), v["why"] or None] for v in answer["values"]]
    return Table("Published and ours.", columns, rows)


def _table(table: dict[str, Any]) -> Table:
    """A column is numeric when its first row is."""
    numeric = [isinstance(cell, (int, float)) for cell in table["rows"][0]]
    columns = [
        Column(name, short if is_number else text)
        for name, is_number in zip(table["columns"], numeric)
    ]
    return Table(table["caption"], columns, table["rows"])


def _spread(curves: list[dict[str, Any]]) -> float:
    xs = [x for curve in curves for x in curve["x"]]
    return max(xs) / min(xs)


def _order(answer: Answer) -> tuple:
    name = answer["figure"]
    number = re.search(r"\d+", name)
    paper = next((i for i, p in enumerate(("TopoEP", "Coupling")) if name.startswith(p)), 2)
    return paper, "Table" not in name, int(number[0]) if number else 99, name
