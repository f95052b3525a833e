"""The ``topoep`` command: what scripts depend on, and what users get wrong."""

import json
import re

import numpy as np
import pytest
import torch

from topoep_titan.cli import main
from topoep_titan.planning import PLANNERS, Plan, check_plan
from topoep_titan.planning.bench_table import LEGEND
from topoep_titan.planning.plan import contiguous_mains

PLAN_KEYS = [
    "planner", "max_over_mean", "inter_node_fraction", "replica_served_fraction", "num_replicas",
    "modelled_us", "plan_us",
]  # fmt: skip
ROW_KEYS = [
    "planner", "implementation", "experts", "top_k", "hidden", "moe_intermediate", "ranks",
    "ranks_per_node", "replica_slots", "workload", "router_skew", "seed", "max_over_mean",
    "inter_node_fraction", "replica_served_fraction", "modelled_us", "plan_us", "bound_us",
    "best_us", "balance_weight",
]  # fmt: skip
TERMS = ["compute", "token", "replica", "plan", "total"]


@pytest.fixture
def load(tmp_path):
    """4 ranks, 8 experts; rank 0 sends 8,000 to expert 4, whose main is on the other node."""
    load_RE = np.full((4, 8), 10, dtype=np.int64)
    load_RE[0, 4] = 8000
    np.save(tmp_path / "load.npy", load_RE)
    return tmp_path / "load.npy"


def plan_command(load, **changes):
    options = {
        "load": load, "ranks-per-node": 2, "replica-slots": 1, "planner": "topoep",
        "hidden": 2048, "moe-intermediate": 768,
    } | {name.replace("_", "-"): value for name, value in changes.items()}  # fmt: skip
    command = ["plan"]
    for name, value in options.items():
        if value is not None:
            command += [f"--{name}", str(value)] if value is not True else [f"--{name}"]
    return command


def test_plan_prints_the_agreed_json_and_writes_the_plan(load, tmp_path, capsys):
    out = tmp_path / "plan.npz"
    assert main(plan_command(load, out=out, json=True)) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(report) == PLAN_KEYS
    assert list(report["modelled_us"]) == TERMS
    assert report["planner"] == "topoep"
    # E4 comes to rank 0 and half of it goes on to rank 1; on the other node rank 3 gives 10 of its
    # 80 to rank 2, which has 60. Of 8,310 assignments, node 0's to E5, E6, E7 and node 1's to E0 to
    # E3 cross.
    assert report["num_replicas"] == 3
    assert report["inter_node_fraction"] == pytest.approx((2 * 3 * 10 + 2 * 4 * 10) / 8310)
    with np.load(out) as saved:
        assert sorted(saved) == ["assignments_RG", "expert_G", "main_E"]
        plan = Plan(torch.from_numpy(saved["expert_G"]), torch.from_numpy(saved["assignments_RG"]))
        main_E = torch.from_numpy(saved["main_E"])
    assert torch.equal(main_E, contiguous_mains(4, 8))
    check_plan(plan, torch.from_numpy(np.load(load)), main_E, 1)


def test_plan_takes_a_placement_and_prints_for_people(load, tmp_path, capsys):
    main_E = tmp_path / "main.npy"
    np.save(main_E, np.array([3, 3, 2, 2, 0, 0, 1, 1], dtype=np.int32))  # expert 4 on rank 0
    assert main(plan_command(load, planner="none", main=main_E)) == 0
    text = capsys.readouterr().out
    assert "none on 2 x 2 ranks" in text
    assert "executed by replicas          0.00%" in text


BAD = {
    "shape": (np.ones(8, np.int64), {}, "load must be a matrix .* shape \\(8,\\)"),
    "float": (np.ones((4, 8)), {}, "holds float64 values; save whole numbers as int64"),
    "nan": (np.full((4, 8), np.nan), {}, "holds float64"),
    "negative": (np.full((4, 8), -3), {}, "rank 0, expert 0 is -3"),
    "uneven": (np.ones((3, 8), np.int64), {}, "8 experts are not a multiple of 3 ranks"),
    "empty": (np.ones((0, 8), np.int64), {}, "multiple of 0 ranks"),
    "overflow": (np.full((4, 8), 2**30), {}, "34359738368 assignments, more than 2147483647"),
    "nodes": (None, {"ranks_per_node": 3}, "4 ranks do not fill nodes of 3"),
    "zero per node": (None, {"ranks_per_node": 0}, "--ranks-per-node is 0"),
    "slots": (None, {"replica_slots": -1}, "replica_slots is -1"),
    "too many slots": (None, {"replica_slots": 10**9}, "more than 6 slots a rank are never used"),
    "word": (None, {"replica_slots": "two"}, "invalid int value: 'two'"),
    "planner": (None, {"planner": "magic"}, "unknown planner 'magic'; choose one of: none, topoep"),
    "hidden": (None, {"hidden": 0}, "--hidden is 0"),
    "cluster": (None, {"cluster": "moon"}, "'moon' cannot be read .* one of: .*h800_4x8"),
    "out": (None, {"out": "/no/such/folder/plan.npz"}, "folder that does not exist"),
    "missing": (None, {"planner": None}, "required: --planner; see topoep plan --help"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_exit_2(case, load, tmp_path, capsys):
    array, changes, message = BAD[case]
    if array is not None:
        np.save(load, array)
    assert main(plan_command(load, **changes)) == 2
    refused(capsys, message)


BAD_MAINS = {
    "E not matching": (np.zeros(7, np.int64), "each of the 8 experts, got shape \\(7,\\)"),
    "out of range": (np.array([0, 0, 1, 1, 2, 2, 3, 4]), "main names rank 4; ranks are 0 to 3"),
    "uneven": (np.array([0, 0, 0, 1, 2, 2, 3, 3]), "3 experts on rank 0"),
    "float": (np.arange(8) / 2, "holds float64"),
}


@pytest.mark.parametrize("case", BAD_MAINS)
def test_bad_placements(case, load, tmp_path, capsys):
    array, message = BAD_MAINS[case]
    np.save(tmp_path / "main.npy", array)
    assert main(plan_command(load, main=tmp_path / "main.npy")) == 2
    refused(capsys, message)


@pytest.mark.parametrize("content", [None, b"", b"not an array", "truncated", "archive", "folder"])
def test_unreadable_files(content, load, tmp_path, capsys):
    path = tmp_path / "bad.npy"
    if content == "truncated":
        path.write_bytes(load.read_bytes()[:-8])
    elif content == "archive":
        np.savez(path.open("wb"), load=np.load(load))
    elif content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    out = tmp_path / "plan.npz"
    assert main(plan_command(path, out=out)) == 2
    refused(capsys, "bad.npy")
    assert not out.exists()


def test_no_file_of_a_command_overwrites_another(load, tmp_path, capsys):
    before = load.read_bytes()
    assert main(plan_command(load, out=load)) == 2
    refused(capsys, "is another file of this command")
    assert load.read_bytes() == before
    assert (
        main(workload_command(tmp_path, "--kind", "zipf", "--ids-out", str(tmp_path / "drawn.npy")))
        == 2
    )
    refused(capsys, "is another file of this command")


def refused(capsys, message):
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert re.search(message, captured.err), captured.err


def test_a_failed_write_leaves_the_old_file(load, tmp_path, capsys, monkeypatch):
    out = tmp_path / "plan.npz"
    out.write_bytes(b"old")

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("topoep_titan.results.os.fsync", full_disk)
    assert main(plan_command(load, out=out)) == 2
    refused(capsys, "No space left on device")
    assert out.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["load.npy", "plan.npz"]


def workload_command(tmp_path, *more):
    return [
        "workload", "--experts", "16", "--top-k", "2", "--ranks", "4", "--tokens-per-rank", "32",
        "--seed", "5", "--out", str(tmp_path / "drawn.npy"), *more,
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["skew", "zipf", "coupled"])
def test_workload_writes_load_and_ids(kind, tmp_path, capsys):
    ids_out = tmp_path / "ids.npy"
    assert main(workload_command(tmp_path, "--kind", kind, "--ids-out", str(ids_out))) == 0
    load, ids = np.load(tmp_path / "drawn.npy"), np.load(ids_out)
    assert (load.dtype, load.shape) == (np.int64, (4, 16))
    assert (ids.dtype, ids.shape) == (np.int16, (4, 32, 2))
    for rank in range(4):
        assert load[rank].tolist() == np.bincount(ids[rank].ravel(), minlength=16).tolist()
    assert main(plan_command(tmp_path / "drawn.npy", planner="eplb")) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kind", "skew", "--router-skew", "nan"], "--router-skew is nan"),
        (["--kind", "zipf", "--router-skew", "-4"], "kind zipf has none"),
        (["--kind", "skew", "--seed", "-1"], "--seed is -1"),
        (["--kind", "skew", "--top-k", "17"], "16 experts with top-k 17"),
        (["--kind", "skew", "--ranks", "0"], "ranks is 0"),
        (["--kind", "skew", "--tokens-per-rank", "10000000000"], "10000000000 tokens per rank"),
        (["--kind", "coupled", "--experts", "18"], "18 experts with top-k 2 do not form 4 equal"),
        (["--kind", "flat"], "invalid choice: 'flat'"),
    ],
)
def test_bad_workloads(options, message, tmp_path, capsys):
    assert main(workload_command(tmp_path, *options)) == 2
    refused(capsys, message)
    assert not (tmp_path / "drawn.npy").exists()


def test_bench_prints_rows_for_scripts_and_a_table_for_people(capsys, monkeypatch):
    monkeypatch.setattr("topoep_titan.planning.bench.REPEATS", 2)
    monkeypatch.setattr("topoep_titan.planning.bench.MILP_SECONDS", 0.1)
    monkeypatch.setattr("topoep_titan.planning.bench.TOKENS", 256)
    command = ["bench-planner", "--cells", "tiny-2x4", "--slots", "0,2"]
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert all(list(row) == ROW_KEYS and list(row["modelled_us"]) == TERMS for row in rows)
    assert {row["planner"] for row in rows} >= {*PLANNERS, "eplb-free", "moonep-free"}
    assert {(row["workload"], row["router_skew"]) for row in rows} == {
        *(("skew", s) for s in (0, -0.5, -1, -2, -4)), ("zipf", None),
    }  # fmt: skip
    for row in rows:
        if row["bound_us"] is not None:
            assert row["bound_us"] <= row["modelled_us"]["total"]
        assert (row["bound_us"] is None) == row["planner"].endswith("-free")

    monkeypatch.setattr("topoep_titan.planning.bench_command.TINY_CELLS", ("tiny-2x4",))
    assert main([*command, "--bounds", "--planner", "none,topoep"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # none, topoep compiled and not, two slots; no summary, and what the columns mean
    assert len(lines) == 1 + 3 * 2 * 6 + 1 + len(LEGEND.splitlines())

    weights = ["--balance-weight", "0,150", "--planner", "joint", "--fastest", "--json"]
    assert main([*command, *weights]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]  # nothing else on stdout
    assert {row["balance_weight"] for row in rows} == {0, 150}
    assert main(["bench-planner", "--cells", "mars"]) == 2
    refused(capsys, "unknown cell 'mars'")
