"""A run killed at any moment and started again by the same command ends with the same losses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from topoep_titan.results import read_result

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).parents[2]
SETTINGS = [
    "--topoep.planner", "topoep", "--parallelism.expert-parallel-degree", "2",
    "--training.local-batch-size", "4", "--training.steps", "16", "--checkpoint.enable",
    "--checkpoint.interval", "5", "--validator.enable", "--validator.freq", "8",
    "--validator.steps", "1",
]  # fmt: skip


def start(folder: Path, name: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [
        "--nproc-per-node",
        "2",
        str(ROOT / "train.py"),
        str(ROOT / "tests/titan/tiny.toml"),
    ]
    command += ["--name", name, "--dump-folder", str(folder)]
    command += ["--dataloader.dataset-path", str(folder / "data"), *SETTINGS]
    with (folder / f"{name}.log").open("a") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def finish(folder: Path, name: str) -> list[dict]:
    assert start(folder, name).wait(120) == 0, (folder / f"{name}.log").read_text()[-3000:]
    return read_result(folder / name / "result.json").steps


def logged_steps(folder: Path, name: str) -> int:
    log = folder / name / "steps.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_killed_run_goes_on_bit_for_bit(folder):
    process = start(folder, "killed")
    deadline = time.monotonic() + 120
    while logged_steps(folder, "killed") < 8:  # past the checkpoint of step 5
        assert process.poll() is None, (folder / "killed.log").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pid in _workers(folder / "killed"):  # torchrun's workers are in sessions of their own
        os.kill(pid, signal.SIGKILL)
    assert not (folder / "killed" / "result.json").exists()

    resumed, unbroken = finish(folder, "killed"), finish(folder, "unbroken")
    assert [step["loss_hex"] for step in resumed] == [step["loss_hex"] for step in unbroken]
    assert (
        "Training starts at step 1\n" not in (folder / "killed.log").read_text().split("INFO")[-1]
    )
    assert [step["step"] for step in unbroken] == list(range(1, 17))

    # The same command again says that the run is finished, and changes nothing.
    before = (folder / "killed" / "result.json").read_bytes()
    finish(folder, "killed")
    assert (folder / "killed" / "result.json").read_bytes() == before
    assert "is finished" in (folder / "killed.log").read_text()
    assert json.loads(before)["validation"]


def _workers(folder: Path) -> list[int]:
    """Processes whose command line names this run."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(folder.parent).encode() in words and folder.name.encode() in words:
            found.append(int(process.name))
    return found
