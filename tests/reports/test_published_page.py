"""One answer beside the published values: the page says both, the verdict and the conditions."""

import json

import pytest

from tests.reports.test_report import make_run
from topoep_titan.errors import InputError
from topoep_titan.reports.page import write_report
from topoep_titan.reports.published import read_answers, write_answers

ANSWER = {
    "figure": "TopoEP Fig. 12", "question": "How much faster?", "kind": "simulated",
    "conditions": "on paper", "command": "python -m recipes.x", "seconds": 1.0, "commit": "abc",
    "values": [
        {"what": "gain", "published": 1.27, "ours": 1.25, "unit": "x", "within": 0.05, "met": True,
         "why": "rounding"},
        {"what": "loss", "published": 0.9, "ours": 0.7, "unit": "x", "within": 0.05, "met": False,
         "why": ""},
        {"what": "unknown", "published": None, "ours": 3.0, "unit": "", "within": None,
         "met": None, "why": ""},
    ],
    "tables": [{"caption": "All.", "columns": ["planner", "ratio"], "rows": [["joint", 1.5]]}],
    "curves": [
        {"panel": "A", "label": "joint", "x": [1, 2], "y": [1.0, 2.0], "published": False},
        {"panel": "A", "label": "joint, published", "x": [1], "y": [1.5], "published": True},
    ],
    "bars": [{"lane": "compute", "label": "expert0", "start": 0.0, "end": 2.0}],
    "axes": ["slots", "ratio"],
}  # fmt: skip


def test_published_and_ours_stand_side_by_side(tmp_path):
    for name, figure in (("b", "TopoEP Fig. 12"), ("a", "Coupling Fig. 5"), ("c", "TopoEP Fig. 3")):
        (tmp_path / f"{name}.json").write_text(json.dumps({**ANSWER, "figure": figure}))
    answers = read_answers(tmp_path)
    assert [a["figure"] for a in answers] == ["TopoEP Fig. 3", "TopoEP Fig. 12", "Coupling Fig. 5"]
    page = write_answers(answers, tmp_path / "out", title="Ours")
    markdown, html = page.with_suffix(".md").read_text(), page.read_text()
    assert "| gain | 1.27 | 1.25 | x | 0.05 | yes | rounding |" in markdown
    assert "| loss | 0.9 | 0.7 | x | 0.05 | no |" in markdown
    assert "Conditions: on paper" in markdown
    # Two figures an answer, each with a label for a screen reader; the page refers to nothing else.
    assert html.count('<svg role="img" aria-label="') == 6
    assert "Stars are published values." in html
    assert "http" not in html


def test_beside_a_run_answers_are_folded_and_said_not_to_be_its_own(tmp_path):
    write_report([make_run()], tmp_path, title="Run", command="x", answers=[ANSWER])
    markdown, html = (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()
    sections, _, body = html.partition("</nav>")
    assert "Fig. 12" not in sections
    run, _, folded = body.partition('<details class="folded">')
    assert "Fig. 12" not in run
    assert "Nothing here was made by the run above" in folded
    row = "| TopoEP Fig. 12 | How much faster? | simulated | gain | 1.27 | 1.25 | x | abc |"
    assert row in markdown
    assert "All values with an agreed band" not in markdown


def test_a_file_that_is_no_answer_is_named(tmp_path):
    with pytest.raises(InputError, match="make figures"):
        write_answers(read_answers(tmp_path), tmp_path / "out", title="Ours")
    (tmp_path / "x.json").write_text('{"figure": "TopoEP Fig. 1"}')
    with pytest.raises(InputError, match=r"x\.json lacks question"):
        read_answers(tmp_path)
