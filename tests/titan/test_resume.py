"""Killed, damaged and interrupted, a run ends by the same command with the same losses."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.ranks import free_port
from tests.titan.training_cases import train
from topoep_titan.titan import device

device.install()

from topoep_titan.errors import InputError
from topoep_titan.results import read_result
from topoep_titan.titan.resume import Resume, damage, resume_from
from train import main

ROOT = Path(__file__).parents[2]
SETTINGS = [
    "--topoep.planner", "topoep", "--parallelism.expert-parallel-degree", "2",
    "--training.local-batch-size", "4", "--training.steps", "16", "--checkpoint.enable",
    "--checkpoint.interval", "5", "--checkpoint.keep-latest-k", "2", "--validator.enable",
    "--validator.freq", "8", "--validator.steps", "1",
]  # fmt: skip


def command(folder: Path, name: str) -> list[str]:
    words = [sys.executable, str(ROOT / "train.py"), str(ROOT / "tests/titan/tiny.toml")]
    words += ["--nproc", "2", "--name", name, "--dump-folder", str(folder)]
    return [*words, "--dataloader.dataset-path", str(folder / "data"), *SETTINGS]


def start(folder: Path, name: str) -> subprocess.Popen:
    with (folder / f"{name}.out").open("w") as out:
        return subprocess.Popen(command(folder, name), stdout=out, stderr=out)


def said(folder: Path, name: str) -> str:
    return (folder / f"{name}.out").read_text()


def logged_steps(folder: Path, name: str) -> int:
    log = folder / name / "steps.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def wait_until(reached: Callable[[], bool], process: subprocess.Popen, folder: Path, name: str):
    deadline = time.monotonic() + 120
    while not reached():
        assert process.poll() is None, said(folder, name)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill(process: subprocess.Popen, run: Path) -> None:
    """At once, ranks too: they are in sessions of their own."""
    process.kill()
    process.wait()
    for pid in _workers(run):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.ranks
def test_killed_damaged_and_interrupted_run_goes_on_bit_for_bit(
    folder, trainers, monkeypatch, capsys
):
    run = folder / "broken"
    process = start(folder, "broken")
    finished = run / "checkpoint" / "step-10" / ".metadata"  # written last
    wait_until(finished.exists, process, folder, "broken")
    kill(process, run)
    assert not (run / "result.json").exists()

    shard = finished.with_name("__1_0.distcp")
    size = shard.stat().st_size
    os.truncate(shard, size - 1)
    process, before = start(folder, "broken"), logged_steps(folder, "broken")
    wait_until(lambda: logged_steps(folder, "broken") >= before + 2, process, folder, "broken")
    process.terminate()  # as Ctrl-C would; a shell may have switched SIGINT off for its jobs
    assert process.wait(60) == 130
    told = said(folder, "broken")
    assert f"step-10 is damaged: __1_0.distcp has {size - 1:,} of {size:,} bytes" in told
    assert f"{run} goes on after step 5 of 16" in told.splitlines()[0]
    assert "broken: interrupted " in told
    assert "Traceback" not in told
    assert not _workers(run)

    assert start(folder, "broken").wait(120) == 0, said(folder, "broken")
    unbroken = next(filter(None, trainers.run(train, 2, free_port(), str(folder), SETTINGS)))
    assert [step["step"] for step in unbroken] == list(range(1, 17))
    resumed = read_result(run / "result.json").steps
    assert [step["loss_hex"] for step in resumed] == [step["loss_hex"] for step in unbroken]

    # Progress is ours alone, and the ranks' own words are in the run's folder.
    assert "broken: step 16/16  loss " in said(folder, "broken")
    assert "INFO" not in said(folder, "broken")
    assert "Training starts at step 1" in (run / "train.log").read_text()

    # The same command again says that the run is finished, and changes nothing.
    before = (run / "result.json").read_bytes()
    monkeypatch.setattr(sys, "argv", command(folder, "broken")[1:])
    assert main() == 0
    assert f"{run} is finished" in capsys.readouterr().out
    assert (run / "result.json").read_bytes() == before
    assert json.loads(before)["validation"]


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Two finished checkpoints of two tensors, and one whose save was interrupted."""
    for step in (5, 10):
        state = {"a": torch.arange(100.0), "b": torch.full((7,), float(step))}
        dcp.save(state, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    (tmp_path / "step-15").mkdir()
    return tmp_path


def test_the_newest_finished_checkpoint_is_used(checkpoints):
    assert damage(checkpoints / "step-10") is None
    interrupted = f"{checkpoints / 'step-15'}: its save was interrupted"
    assert resume_from(checkpoints) == Resume(10, (interrupted,))
    assert resume_from(checkpoints, load_step=5) == Resume(5, ())
    assert resume_from(checkpoints / "none") == Resume(None, ())


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    at = damaged.index(torch.arange(100.0).numpy().tobytes()[64:128])  # in the middle of "a"
    damaged[at] ^= 1
    path.write_bytes(damaged)


@pytest.mark.parametrize(
    ("file", "harm", "message"),
    [
        ("__0_0.distcp", truncate, r"__0_0.distcp has [\d,]+ of [\d,]+ bytes"),
        ("__0_0.distcp", Path.unlink, "__0_0.distcp is missing"),
        ("__0_0.distcp", flip, r"__0_0.distcp was changed \(bytes "),
        (".metadata", truncate, ".metadata cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(checkpoints, file, harm, message):
    harm(checkpoints / "step-10" / file)
    found = resume_from(checkpoints)
    assert found.step == 5
    assert f"{checkpoints / 'step-10'} is damaged: " in found.notes[1]
    with pytest.raises(InputError, match=rf"checkpoint.load_step is 10: {message}"):
        resume_from(checkpoints, load_step=10)
    harm(checkpoints / "step-5" / file)
    with pytest.raises(InputError, match=rf"step-5 is damaged: {message}.*or start from the begin"):
        resume_from(checkpoints)


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
