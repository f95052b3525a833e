"""Ranks started from here: what the terminal shows of their progress, and of their failures."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from topoep_titan.titan.launch import Progress, launch
from topoep_titan.titan.step_log import StepLog

RANK = """
import json, os, pathlib, sys
folder, ending = pathlib.Path(sys.argv[1]), sys.argv[2]
record = {"step": 2, "loss": 7.5, "max_over_mean_before": 1.5, "max_over_mean": 1.25}
record |= {"tokens_per_second": 4000.0}
(folder / "steps.jsonl").write_text(json.dumps(record) + chr(10))
print("a word of the rank")
if ending == "refuse":
    sys.exit("train.py: the folder is in use")
if ending == "die":
    os.kill(os.getpid(), 9)
if ending == "fail":
    raise RuntimeError("no more memory")
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ending", "code", "told"),
    [
        ("end", 0, ""),
        ("refuse", 2, "train.py: the folder is in use\n"),
        ("fail", 1, "RuntimeError: no more memory\n"),
        ("die", 1, r"traceback : Signal 9 \(SIGKILL\) received by PID \d+\n"),
    ],
)
def test_progress_is_shown_and_a_failure_with_its_reason(tmp_path, capsys, ending, code, told):
    folder, script = tmp_path / "mine", tmp_path / "rank.py"
    script.write_text(RANK)
    folder.mkdir()
    (folder / "train.log").write_text("OldError: of an earlier start\n")
    assert launch([str(script), str(folder), ending], folder, nproc=1, steps=2) == code
    out, err = capsys.readouterr()
    line = "mine: step 2/2  loss 7.5000  max/mean 1.50 -> 1.25  4,000 tokens/s\n"
    assert f"mine: starting\n{line}" in out
    assert ("Result: " in out) == (code == 0)
    failure = re.escape(f"mine failed; from {folder}/train.log:\n")
    assert re.fullmatch(failure + told if code else "", err)
    assert "a word of the rank" in (folder / "train.log").read_text()


def test_a_rank_leaves_with_its_words_and_without_closing_the_interpreter():
    script = """
import atexit
from topoep_titan.titan.launch import leave
atexit.register(print, "closing")
print("the last word", end="")
leave(3)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (3, "the last word")


def test_steps_of_an_earlier_start_are_not_shown_again(tmp_path: Path):
    log = StepLog(tmp_path)
    record = {"max_over_mean_before": 2.0, "max_over_mean": 1.0, "tokens_per_second": 1e3}
    log.append(record | {"step": 37, "loss": 6.0})
    progress = Progress(tmp_path, steps=40)
    assert progress._newest() is None
    log.append(record | {"step": 21, "loss": 6.5})  # from the checkpoint of step 20
    log.append({"step": 21, "validation_loss": 6.75})
    with log.path.open("a") as file:
        file.write(json.dumps(record | {"step": 22})[:20])  # being written
    newest = progress._newest()
    assert progress.line(newest, pace=2.0) == (
        f"{tmp_path.name}: step 21/40  loss 6.5000 (validation 6.7500)  max/mean 2.00 -> 1.00  "
        "1,000 tokens/s  38 s left"
    )
    assert progress._newest() is None


def test_a_resumed_log_holds_every_step_once_and_what_happened_between(tmp_path: Path):
    log = StepLog(tmp_path)
    record = {"max_over_mean_before": 2.0, "max_over_mean": 1.0, "tokens_per_second": 1e3}
    for step in (1, 2, 3, 4):
        log.append(record | {"step": step, "loss": 8.0 - step})
    log.append({"step": 2, "validation_loss": 6.5})
    progress = Progress(tmp_path, steps=4)
    log.forget_from(3)  # the checkpoint of step 2
    assert [line["step"] for line in log.after(0)[0]] == [1, 2]
    assert progress._newest() is None
    log.append({"step": 2, "note": "placement: nothing moves"})
    log.append(record | {"step": 3, "loss": 4.5})
    assert progress._newest()["loss"] == 4.5
    assert progress._notes == [f"{tmp_path.name}: after step 2, placement: nothing moves"]
    steps, validation = log.read()
    assert ([step["loss"] for step in steps], validation) == ([7.0, 6.0, 4.5], [])
    log.forget_from(1)
    assert log.read() == [[], []]
