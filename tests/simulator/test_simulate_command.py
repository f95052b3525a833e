"""``topoep simulate``: what it prints, a recorded trace against its draw, and what it refuses."""

import json
import re

import numpy as np
import pytest

from topoep_titan.cli import main
from topoep_titan.planning.workloads import skew
from topoep_titan.reports.page import report_command
from topoep_titan.results import read_result

DEBUG = ["simulate", "--model", "qwen3_debug", "--cluster", "cpu_local"]


def rows(capsys, *options):
    assert main([*DEBUG, *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]


def test_every_planner_and_both_baselines(capsys):
    names = ["megatron", "none", "topoep", "joint", "eplb", "eplb-stale"]
    found = rows(capsys, "--planner", ",".join(names), "--tokens-per-rank", "256")
    assert [row["planner"] for row in found] == names
    by_name = {row["planner"]: row for row in found}
    assert by_name["none"]["max_over_mean"] == by_name["none"]["max_over_mean_before"] > 1.5
    assert by_name["joint"]["max_over_mean"] < by_name["none"]["max_over_mean"]
    # Without balancing the plans are the same; only the backend differs.
    assert by_name["megatron"]["modelled_us"] == by_name["none"]["modelled_us"]
    assert by_name["megatron"]["simulated_us"] != by_name["none"]["simulated_us"]
    for row in found:
        step, moe = row["simulated_us"]["total"], row["simulated_us"]["moe"]
        assert 0 < moe < step
        assert row["tokens_per_second"] == pytest.approx(4 * 256 / step * 1e6)


def test_the_papers_step_starts_from_megatrons_published_throughput(capsys):
    command = ["simulate", "--model", "qwen3_30b_a3b_5l", "--planner", "megatron,topoep"]
    assert main([*command, "--paper-step"]) == 0
    _, _, megatron, topoep, *notes = capsys.readouterr().out.splitlines()
    assert " 329,700 " in megatron  # Figure 13a; put in
    assert 1.21 <= float(topoep.split()[-1]) <= 1.31  # Figure 12: 1.266, within five points
    assert "UNCALIBRATED" not in str(notes)
    assert main([*command, "--paper-step", "--seed", "3"]) == 2
    assert "--paper-step fixes --seed" in capsys.readouterr().err
    assert main([*DEBUG, "--planner", "megatron,none", "--tokens-per-rank", "64"]) == 0
    assert "UNCALIBRATED" in capsys.readouterr().out


def test_a_trace_replays_as_the_draw_that_it_recorded(capsys, tmp_path):
    ids = np.stack([skew(32, 4, 4, 64, router_skew=-2.0, seed=s).numpy() for s in (5, 6, 7, 8)])
    np.savez(tmp_path / "step-000001.npz", ids=ids, microbatch_tokens=np.array([64]))
    recorded = rows(capsys, "--planner", "joint", "--trace", str(tmp_path))
    drawn = rows(capsys, "--planner", "joint", "--tokens-per-rank", "64", "--seed", "5",
                 "--router-skew", "-2")  # fmt: skip
    assert recorded == drawn
    assert main([*DEBUG, "--planner", "none", "--trace", str(tmp_path)]) == 0
    assert "does not say how many ranks shared a node" in capsys.readouterr().err
    # Two microbatches of half the tokens are planned each by itself.
    np.savez(tmp_path / "step-000001.npz", ids=ids, microbatch_tokens=np.array([32, 32]))
    assert rows(capsys, "--planner", "joint", "--trace", str(tmp_path)) != recorded


def test_results_are_what_was_printed_and_a_report_overlays_them(capsys, tmp_path):
    printed = rows(capsys, "--planner", "none,joint", "--tokens-per-rank", "64", "--out",
                   str(tmp_path / "runs"))  # fmt: skip
    runs = [tmp_path / "runs" / name for name in ("none", "joint")]
    for run, row in zip(runs, printed):
        result = read_result(run / "result.json")
        assert (result.kind, result.routing, result.ranks) == ("simulated", "skew -4", 4)
        [step] = result.steps
        assert step["tokens_per_second"] == pytest.approx(row["tokens_per_second"])
        assert step["seconds"] == pytest.approx(row["simulated_us"]["total"] / 1e6)
        assert step["max_over_mean"] == pytest.approx(row["max_over_mean"])
        assert len(step["layers"]) == 4
        assert result.modelled_us == row["modelled_us"]
    page = report_command(runs, tmp_path / "report")
    found = json.loads(page.with_name("results.json").read_text())["runs"]
    ratio = printed[1]["tokens_per_second"] / printed[0]["tokens_per_second"]
    assert found[1]["compared_with_none"]["speed_ratio"] == pytest.approx(ratio)


def test_a_trace_keeps_its_nodes(capsys, tmp_path):
    """Uniform routing: of 4 ranks in nodes of 2, half of the assignments leave the node."""
    ids = np.stack([skew(32, 4, 4, 64, router_skew=0.0, seed=s).numpy() for s in range(4)])
    np.savez(tmp_path / "step-000001.npz", ids=ids, ranks_per_node=2)
    trace = [*DEBUG, "--planner", "none", "--trace", str(tmp_path)]
    for options, nodes, far in (
        (["--json"], 2, 0.5),
        (["--ranks-per-node", "1", "--json"], 4, 0.75),
    ):
        assert main([*trace, *options]) == 0
        captured = capsys.readouterr()
        report = json.loads(captured.out.splitlines()[-1])
        assert report["nodes"] == nodes
        assert report["rows"][0]["inter_node_fraction"] == pytest.approx(far, abs=0.05)
        assert captured.err == ""


GOOD_IDS = np.stack([skew(32, 4, 4, 8, router_skew=0.0, seed=s).numpy() for s in range(4)])
BAD_TRACES = {
    "empty file": (b"", "is not a trace"),
    "no archive": (b"PK\x03\x04 and no more", "is not a trace"),
    "an array": (GOOD_IDS, "it is one array"),
    "no ids": ({"load": GOOD_IDS}, "is not a trace .*ids"),
    "float ids": ({"ids": GOOD_IDS.astype(float)}, "holds float64"),
    "twice": ({"ids": np.zeros_like(GOOD_IDS)}, r"chose an expert twice: \[0, 0, 0, 0\]"),
    "layers": ({"ids": GOOD_IDS[:2]}, "holds 2 layers of top-4; the model has 4 layers"),
    "3 ranks": ({"ids": GOOD_IDS[:, :3]}, "3 ranks do not divide 32 experts"),
    "no token": ({"ids": GOOD_IDS[:, :, :0]}, "at least one token"),
    "more cut": (
        {"ids": GOOD_IDS, "microbatch_tokens": [8, 8]},
        "16 tokens a rank, the ids 8",
    ),
    "no cut": ({"ids": GOOD_IDS, "microbatch_tokens": []}, "must be counts"),
    "nodes of 3": ({"ids": GOOD_IDS, "ranks_per_node": 3}, "do not fill nodes of"),
}


@pytest.mark.parametrize("case", BAD_TRACES)
def test_a_damaged_trace_is_one_message(capsys, tmp_path, case):
    content, message = BAD_TRACES[case]
    with (tmp_path / "step-000001.npz").open("wb") as file:
        if isinstance(content, bytes):
            file.write(content)
        elif isinstance(content, dict):
            np.savez(file, **content)
        else:
            np.save(file, content)
    assert main([*DEBUG, "--planner", "none", "--trace", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert re.search(message, captured.err), captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--planner", "none", "--router-skew", "nan"], "router skew is nan"),
        (["--planner", "magic"], "unknown planner 'magic'"),
        (["--planner", "none", "--ranks", "5"], "5 ranks do not divide the 32 experts"),
        (["--planner", "none", "--trace", "nowhere"], "no trace in nowhere"),
        (["--planner", "none", "--calibration", "nowhere"], "cannot be read"),
        (["--planner", "none", "--tokens-per-rank", "0"], "--tokens-per-rank is 0"),
        (["--planner", "none", "--out", __file__], "is a file; give a folder"),
        (["--planner", "none", "--trace", "t", "--ranks", "4"], "leave out --workload, --ranks"),
    ],
)
def test_wrong_input_is_one_message_and_exit_2(capsys, options, message):
    assert main([*DEBUG, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_calibration_file_names_what_is_wrong(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    for content, message in (("[plain]\nspeed = 2", "speed = 2"), ("[fast]\n", "unknown fast")):
        path.write_text(content)
        assert main([*DEBUG, "--planner", "none", "--calibration", str(path)]) == 2
        assert message in capsys.readouterr().err
    path.write_text("[chunked]\ncompute_scale = 2.0")
    slow = rows(capsys, "--planner", "none", "--no-overlap", "--calibration", str(path))
    fast = rows(capsys, "--planner", "none", "--no-overlap")
    assert slow[0]["simulated_us"]["moe"] > 1.5 * fast[0]["simulated_us"]["moe"]
