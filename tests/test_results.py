"""A RunResult survives its file; anything else is refused with the file's name and the reason."""

import json

import pytest

from topoep_titan.errors import InputError
from topoep_titan.results import LAYER_KEYS, STEP_KEYS, RunResult, read_result, write_result


def a_result() -> RunResult:
    step = dict.fromkeys(STEP_KEYS, 1.0) | {
        "step": 1, "loss_hex": (1.0).hex(), "layers": [dict.fromkeys(LAYER_KEYS, 1.0)],
    }  # fmt: skip
    return RunResult("measured", "r", "none", "alltoall", "natural", 4, [step], name="x")


def test_round_trip(tmp_path):
    write_result(a_result(), tmp_path / "result.json")
    assert read_result(tmp_path / "result.json") == a_result()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"steps": 5}, "steps is 5"),
        ({"steps": [7]}, "not iterable|not a container"),
        ({"steps": [{"step": 1}]}, "step 1 lacks loss"),
        ({"steps": [a_result().steps[0] | {"loss": "low"}]}, "loss is 'low'"),
        ({"steps": [a_result().steps[0] | {"layers": [{"max_over_mean": []}]}]}, "max_over_mean"),
        ({"ranks": "four"}, "ranks is 'four'"),
        ({"ranks": 0}, "ranks is 0"),
        ({"kind": "foo"}, "kind is 'foo'"),
        ({"steps": [a_result().steps[0] | {"step": None}]}, "step is None"),
        ({"steps": [a_result().steps[0] | {"loss": 10**400}]}, "loss is 1000"),
        ({"steps": [a_result().steps[0] | {"layers": [{"rank_load": 3}]}]}, "rank_load is 3"),
        ({"measured_us": {"step": "a"}}, "step is 'a'"),
        ({"modelled_us": "x"}, "modelled_us is 'x'"),
        ({"validation": [1]}, "validation is 1"),
        ({"config": {"topoep": 3}}, "config.topoep is 3"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_wrong_values(tmp_path, change, reason):
    path = tmp_path / "result.json"
    write_result(a_result(), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=f"result.json is not a RunResult: .*({reason})"):
        read_result(path)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xfe"])
def test_files_of_something_else(tmp_path, content):
    path = tmp_path / "result.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not a RunResult"):
        read_result(path)
