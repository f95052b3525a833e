"""Two-step runs whose every number is arithmetic, then the page's laws, then the edges."""

import json
import math
from html.parser import HTMLParser

import pytest

from topoep_titan.errors import InputError
from topoep_titan.reports.page import report_command, write_report
from topoep_titan.results import LAYER_KEYS, RunResult, write_result

MISSING = "\N{EN DASH}"
VOID = {"meta", "link", "br", "hr", "img", "input"}


def make_run(planner="none", losses=(4.0, 2.0), rates=(100.0, 200.0), after=(1.5, 3.0), **given):
    """One step per loss; two MoE layers, max/mean 1.5 and 3.0 before the plan, ``after`` under it.

    A planner other than none crosses nodes with 1/4 of the assignments instead of 1/2, serves 1/8
    by replicas, holds 3 and 5 replicas in its two layers and plans in 10 and 30 us.
    """
    moves = planner != "none"
    layers = [
        dict(
            zip(LAYER_KEYS, (before, now, *((0.25, 0.125, n, us) if moves else (0.5, 0, 0, None))))
        )
        for before, now, n, us in zip((1.5, 3.0), after, (3, 5), (10.0, 30.0))
    ]
    means = {key: (layers[0][key] + layers[1][key]) / 2 for key in LAYER_KEYS[:4]}
    steps = [
        {"step": i + 1, "loss": loss, "loss_hex": None if loss is None else loss.hex(),
         "seconds": 1.0, "tokens_per_second": rate, **means, "layers": layers}
        for i, (loss, rate) in enumerate(zip(losses, rates))
    ]  # fmt: skip
    common = dict(kind="measured", recipe="toml_configs/debug.toml", dispatcher="alltoall",
                  routing="natural", ranks=4, steps=steps, commit="abc1234",
                  versions={"torch": "2.14.1"}, hardware={"processor": "CPU <A&B>"},
                  config={"topoep": {"planner": planner}, "training": {"steps": 2}})  # fmt: skip
    return RunResult(planner=planner, **(common | given))


def joint_run(**given):
    # 2.002 against 2.0 is a relative difference of 0.001; the first step is bitwise equal.
    return make_run("joint", (4.0, 2.002), rates=(90.0, 180.0), after=(1.0, 1.5), **given)


def report(tmp_path, *results):
    """(results.json, Markdown, HTML) of a report."""
    write_report(list(results), tmp_path, title="Test", command="topoep report a b")
    numbers = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    return numbers, (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()


def cells(markdown, first):
    """The rows of all Markdown tables that begin with this cell."""
    rows = [line.strip("| ").split(" | ") for line in markdown.splitlines() if line[:1] == "|"]
    return [row[1:] for row in rows if row[0] == first]


class WellFormed(HTMLParser):
    """Every element closes in order; ids are unique; collects attributes and text."""

    def __init__(self, page):
        super().__init__()
        self.open, self.attributes, self.text = [], [], ""
        self.feed(page)
        assert self.open == []
        ids = [value for _, name, value in self.attributes if name == "id"]
        assert len(ids) == len(set(ids))
        self.ids = set(ids)

    def handle_starttag(self, tag, attributes):
        self.attributes += [(tag, *pair) for pair in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.attributes += [(tag, *pair) for pair in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data):
        self.text += data


def test_numbers_by_hand(tmp_path):
    joint = joint_run(validation=[{"step": 1, "loss": 4.5}, {"step": 2, "loss": 2.5}])
    numbers, markdown, _ = report(tmp_path, joint, make_run())
    none, joint = numbers["runs"]  # the baseline comes first, whatever the order given
    assert none["planner"] == "none"
    assert none["compared_with_none"] is None
    assert none["summary"]["tokens_per_second"] == 150.0
    assert joint["summary"] == {
        "steps": 2, "first_loss": 4.0, "last_loss": 2.002, "last_validation_loss": 2.5,
        "max_over_mean_before": 2.25, "max_over_mean": 1.25, "inter_node_fraction": 0.25,
        "replica_served_fraction": 0.125, "replicas_per_layer": 4.0, "tokens_per_second": 135.0,
        "plan_us": 20.0, "non_finite_losses": 0,
    }  # fmt: skip
    compared = joint["compared_with_none"]
    assert compared["speed_ratio"] == pytest.approx(0.9)
    assert compared["bitwise_equal"] == 1
    assert compared["mean_difference"] == pytest.approx(0.0005)
    assert compared["max_difference"] == pytest.approx(0.001)
    assert compared["max_difference_step"] == 2

    balance, training, loss, layer_0, layer_1, conditions = cells(markdown, "joint")
    assert balance == ["2", "2.250", "1.250", "25.00", "12.50", "4.00", "20.0"]
    assert training == ["2", "4.0000", "2.0020", "2.5000", "2", "135", "0.900"]
    assert loss == ["2", "1", "0.05", "0.1", "2"]
    assert layer_0 == ["0", "1.500", "1.000", "25.00", "12.50", "3.00", "10.0"]
    assert layer_1 == ["1", "3.000", "1.500", "25.00", "12.50", "5.00", "30.0"]
    assert conditions[:2] == ["alltoall", "abc1234"]
    assert cells(markdown, "none")[1][-3:] == [MISSING, "150", "1.000"]  # no validation: an en dash
    assert cells(markdown, "TopoEP paper, Fig. 14") == [
        ["10,000", MISSING, "0.088", "0.407", MISSING]
    ]
    assert cells(markdown, "topoep.planner") == [['"none"', '"joint"']]  # and training.steps is not


def test_unequal_lengths_compare_the_common_steps(tmp_path):
    longer = make_run("topoep", (4.0, 2.0, 99.0), rates=(50.0, 100.0, 9_000.0))
    numbers, markdown, _ = report(tmp_path, make_run(), longer)
    compared = numbers["runs"][1]["compared_with_none"]
    assert (compared["common_steps"], compared["bitwise_equal"]) == (2, 2)
    assert compared["speed_ratio"] == 0.5  # 75 over 150: the third step has no partner
    assert compared["max_difference"] == 0.0
    assert "`topoep` has 3 steps and `none` 2" in markdown
    assert "on the 2 steps that both have" in markdown


def test_runs_of_another_setting_are_not_compared(tmp_path):
    simulated = joint_run(kind="simulated")
    numbers, markdown, page = report(tmp_path, make_run(), simulated)
    assert [run["compared_with_none"] for run in numbers["runs"]] == [None, None]
    assert len(cells(markdown, "joint")[1]) == 6  # steps to tokens/s: no ratio to none
    WellFormed(page)

    skewed = [make_run(routing="skew -4"), joint_run(routing="skew -4")]
    _, markdown, _ = report(tmp_path, *skewed)
    assert "losses are not compared" in markdown
    assert "Loss equivalence" not in markdown


def test_page_is_well_formed_self_contained_and_deterministic(tmp_path):
    first = report(tmp_path / "a", make_run(), joint_run())
    assert report(tmp_path / "b", make_run(), joint_run()) == first
    page = WellFormed(first[2])
    for tag, name, value in page.attributes:
        if name in ("src", "href", "xlink:href", "data", "action"):
            assert value.startswith(("#", "data:")), f"<{tag} {name}={value[:60]}>"
            assert value[0] != "#" or value[1:] in page.ids, f"{value} leads nowhere"
    assert "http" not in first[2]
    assert "@import" not in first[2]
    svgs = sum(tag == "svg" and name == "aria-label" for tag, name, _ in page.attributes)
    assert svgs == first[2].count("<svg") == 6  # no validation points: no such figure
    assert "CPU <A&B>" in page.text


def test_same_planner_twice_and_missing_values(tmp_path):
    blank = joint_run(dispatcher="dedup")
    blank.steps[0] |= {"loss": math.nan, "layers": []}
    blank.steps[1] |= {"loss": None, "loss_hex": None, "tokens_per_second": None}
    numbers, markdown, page = report(tmp_path, make_run(), joint_run(), blank)
    labels = [run["label"] for run in numbers["runs"]]
    assert labels == ["none", "joint (alltoall)", "joint (dedup)"]
    assert cells(markdown, "joint (dedup)")[1] == ["2", *[MISSING] * 4, "90", "0.900"]
    assert "`joint (dedup)` is not finite on 1 step," in markdown
    WellFormed(page)


def test_sliders_hold_the_load_of_every_rank(tmp_path):
    run = joint_run()
    for number, step in enumerate(run.steps):
        loads = [[1.5 - index, 0.5 + number] for index in range(2)]
        step["layers"] = [
            {**layer, "rank_load_before": [2.0, 0.0], "rank_load": load}
            for layer, load in zip(step["layers"], loads)
        ]
    _, markdown, page = report(tmp_path, make_run(), run)
    WellFormed(page)
    title = "joint: load of each rank over the mean rank, under the plan"
    assert f"{title}: a slider over steps" in markdown
    data = page[page.index(title) :].partition('<script type="application/json">')[2]
    data = json.loads(data.partition("</script>")[0])
    # rank -> layer -> step
    assert data == {
        "steps": [1, 2],
        "rows": {"rank 0": [[1.5, 1.5], [0.5, 0.5]], "rank 1": [[0.5, 1.5], [0.5, 1.5]]},
    }


def test_single_run_and_single_step(tmp_path):
    one = make_run("joint", (4.0,), (100.0,))
    numbers, _, page = report(tmp_path, one)
    assert numbers["runs"][0]["summary"]["first_loss"] == 4.0
    WellFormed(page)


def test_report_command_reads_run_folders(tmp_path):
    for name, result in (("a", make_run()), ("b", joint_run())):
        (tmp_path / name).mkdir()
        write_result(result, tmp_path / name / "result.json")
    runs, out = [tmp_path / "a", tmp_path / "b"], tmp_path / "out"
    page = report_command(runs, out)
    assert sorted(path.name for path in out.iterdir()) == [
        "report.html", "report.md", "results.json",
    ]  # fmt: skip
    assert f"topoep report {runs[0]} {runs[1]} --out {out}" in page.read_text()


def test_runs_have_their_names_and_shared_cores_no_speed(tmp_path):
    cores = {"hardware": {"cores": 2, "machines": 1}}
    for name, result in (("a", make_run(name="a", **cores)), ("b", joint_run(name="b", **cores))):
        (tmp_path / "runs" / name).mkdir(parents=True)
        write_result(result, tmp_path / "runs" / name / "result.json")
    page = report_command([tmp_path / "runs"], tmp_path / "out")  # a folder of runs
    labels = [
        run["label"] for run in json.loads(page.with_name("results.json").read_text())["runs"]
    ]
    assert labels == ["a (none)", "b (joint)"]
    markdown = page.with_suffix(".md").read_text()
    assert "Tokens/s are no result here: 4 ranks share 2 cores" in markdown
    assert "times the tokens/s" not in markdown
    assert report(tmp_path, joint_run(name="b"))[0]["runs"][0]["label"] == "b"


def test_wrong_input_says_so_and_writes_nothing(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(InputError, match="no result at"):
        report_command([tmp_path / "absent"], out)
    with pytest.raises(InputError, match="at least one run"):
        report_command([], out)
    with pytest.raises(InputError, match="has no steps"):
        write_report([make_run(losses=())], out, title="Test", command="")
    assert not out.exists()
    out.write_text("a file")
    with pytest.raises(InputError, match="choose another folder"):
        write_report([make_run()], out, title="Test", command="")
