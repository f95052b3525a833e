"""recipes/slurm/train.sbatch with stand-ins for Slurm's commands: what it checks and starts."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "recipes" / "slurm" / "train.sbatch"


@pytest.fixture
def cluster(tmp_path):
    """Every command writes its arguments, one line a call, and ends as CHECK says."""
    for name, body in {
        "scontrol": "printf 'node7\\nnode8\\n'",
        "srun": 'echo "srun $*" >> calls',
        "venv/bin/python": 'echo "python $*" >> calls; exit ${CHECK:-0}',
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def launch(*arguments, **given):
        environment = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "VENV": "venv", "SLURM_NNODES": "2",
            "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "41", "SLURM_GPUS_ON_NODE": "8",
        } | given  # fmt: skip
        done = subprocess.run(
            ["bash", str(SCRIPT), *arguments], cwd=tmp_path, env=environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        calls = tmp_path / "calls"
        return done, calls.read_text().splitlines() if calls.exists() else []

    return launch


def test_checks_all_ranks_then_starts_one_launcher_a_node(cluster):
    done, calls = cluster("r.toml", "mine", "--topoep.planner", "joint")
    assert done.returncode == 0, done.stderr
    assert calls[0] == (
        "python train.py r.toml --check --nproc 16 --name mine --topoep.planner joint"
    )
    assert calls[1].startswith("srun --kill-on-bad-exit=1 venv/bin/torchrun --nnodes 2")
    assert "--nproc-per-node 8" in calls[1]
    assert "--rdzv-endpoint node7:20041" in calls[1]
    assert calls[1].endswith("train.py r.toml --name mine --topoep.planner joint")


def test_a_refused_recipe_starts_nothing(cluster):
    done, calls = cluster("r.toml", "mine", CHECK="2")
    assert done.returncode == 2
    assert len(calls) == 1
    done, _ = cluster("r.toml")
    assert done.returncode == 2
    assert "give RECIPE NAME" in done.stderr
