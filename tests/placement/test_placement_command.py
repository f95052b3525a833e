"""``topoep placement``: what it writes, says and refuses."""

import json
import re

import numpy as np
import pytest

from tests.native_library import build_or_skip
from topoep_titan.cli import main


@pytest.fixture(scope="module", autouse=True)
def _library():
    build_or_skip()


def test_fit_then_evaluate_on_drawn_routing(tmp_path, capsys):
    out = str(tmp_path / "placement.npz")
    drawn = ["--preset", "top6", "--tokens", "2048", "--layers", "2", "--json"]
    assert main(["placement", "fit", *drawn, "--ranks", "8", "--out", out]) == 0
    fitted = json.loads(capsys.readouterr().out.splitlines()[-1])
    with np.load(out) as archive:
        assert archive["main_LE"].shape == (2, 128)
        assert (np.bincount(archive["main_LE"][1]) == 16).all()
    assert fitted["placed"]["rows"] < 0.7 * fitted["contiguous"]["rows"]
    assert main(["placement", "evaluate", *drawn, "--placement", out]) == 0
    judged = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert judged["placed"] == fitted["placed"]
    assert main(["placement", "evaluate", *drawn[:-1], "--seed", "1", "--placement", out]) == 0
    assert "rows_removed" in capsys.readouterr().out


def test_a_recorded_trace(tmp_path, capsys):
    """Experts 0 and 2, and 1 and 3, always serve together: one rank each then suffices."""
    ids = np.zeros((1, 2, 8, 2), dtype=np.int16)
    ids[..., 0], ids[..., 1] = [0, 1] * 4, [2, 3] * 4
    (tmp_path / "trace").mkdir()
    for step in (1, 2):
        np.savez(tmp_path / "trace" / f"step-{step:06d}.npz", ids=ids)
    trace, out = str(tmp_path / "trace"), str(tmp_path / "p.npz")
    assert main(["placement", "fit", "--trace", trace, "--ranks", "2", "--out", out, "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["tokens"] == 32
    assert report["contiguous"]["rows"] == 2
    assert report["placed"]["rows"] == 1


def test_a_trace_keeps_its_nodes_and_is_sampled(tmp_path, capsys):
    """Nodes of the recording run; the sample says its size, and the figures are of all tokens."""
    ids = np.tile(np.arange(8, dtype=np.int16).reshape(1, 4, 1, 2), (2, 1, 25, 1))
    trace, out = tmp_path / "step-000001.npz", str(tmp_path / "p.npz")
    np.savez(trace, ids=ids, ranks_per_node=2)
    fit = ["placement", "fit", "--trace", str(trace), "--ranks", "4", "--out", out]
    assert main([*fit, "--tokens", "64", "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == ""
    assert (report["ranks_per_node"], report["tokens"], report["fitted_tokens"]) == (2, 100, 64)
    with np.load(out) as archive:
        assert int(archive["ranks_per_node"]) == 2
    np.savez(trace, ids=ids)
    assert main(fit) == 0
    captured = capsys.readouterr()
    assert "does not say how many ranks shared a node; taking one node of 4" in captured.err
    assert re.search(r"fitted_tokens +100\n", captured.out)


DAMAGED = {
    "empty": (b"", "is not a placement"),
    "array": (np.zeros((1, 4), np.int64), "it is one array"),
    "no ranks": ({"ranks": 0}, "4 experts on 0 ranks"),
    "list of ranks": ({"ranks": [2, 2]}, "is not a placement"),
    "uneven": ({"main_LE": [[0, 0, 0, 1]]}, "puts 3 experts on rank 0"),
    "rank 2": ({"main_LE": [[0, 0, 1, 2]]}, "main names rank 2"),
    "floats": ({"main_LE": [[0.0, 0.0, 1.0, 1.0]]}, "is not a placement"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_placement_is_one_message(tmp_path, capsys, case):
    content, message = DAMAGED[case]
    path = tmp_path / "p.npz"
    with path.open("wb") as file:
        if isinstance(content, bytes):
            file.write(content)
        elif isinstance(content, np.ndarray):
            np.save(file, content)
        else:
            good = {"main_LE": [[0, 0, 1, 1]], "ranks": 2, "ranks_per_node": 2}
            np.savez(file, **(good | content))
    assert main(["placement", "evaluate", "--preset", "top2", "--placement", str(path)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)


BAD_IDS = {
    "no token": np.zeros((0, 2), np.int16),
    "top-0": np.zeros((4, 0), np.int16),
    "floats": np.zeros((4, 2)),
    "too high": np.full((4, 2), 2**15),
    "twice": np.zeros((4, 2), np.int16),
}


@pytest.mark.parametrize("ids", BAD_IDS.values(), ids=BAD_IDS)
def test_ids_that_no_router_writes(tmp_path, capsys, ids):
    np.save(tmp_path / "ids.npy", ids)
    out = str(tmp_path / "p.npz")
    fit = ["placement", "fit", "--ids", str(tmp_path / "ids.npy"), "--ranks", "2", "--out", out]
    assert main(fit) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["fit", "--preset", "top2", "--experts", "1000000", "--ranks", "8", "--out", "{}/p"],
            "1000000 experts; the ids go up to 127",
        ),
        (
            [
                "fit",
                "--preset",
                "top6",
                "--tokens",
                "100000000000",
                "--ranks",
                "8",
                "--out",
                "{}/p",
            ],
            "--tokens is 100000000000; give an integer from 1 to 1048576",
        ),
        (["fit", "--preset", "top2", "--ranks", "8", "--out", "/proc/p.npz"], "/proc/p.npz cannot"),
        (["fit", "--preset", "top2", "--ranks", "7", "--out", "{}/p"], "not a multiple of 7"),
        (["fit", "--trace", "{}/none", "--ranks", "2", "--out", "{}/p"], "no trace in"),
        (["fit", "--preset", "top2", "--ranks", "8", "--out", "{}/x/p"], "existing folder"),
        (["evaluate", "--preset", "top2", "--placement", "{}/none"], "none cannot be read"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, capsys, arguments, message):
    assert main(["placement", *(word.format(tmp_path) for word in arguments)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
