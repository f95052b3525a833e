"""``topoep placement``: what it writes, says and refuses."""

import json

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "--preset", "top2", "--ranks", "7", "--out", "{}/p"], "not a multiple of 7"),
        (["fit", "--trace", "{}/none", "--ranks", "2", "--out", "{}/p"], "holds no expert ids"),
        (["fit", "--preset", "top2", "--ranks", "8", "--out", "{}/x/p"], "existing folder"),
        (["evaluate", "--preset", "top2", "--placement", "{}/none"], "is no placement"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, capsys, arguments, message):
    assert main(["placement", *(word.format(tmp_path) for word in arguments)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
