"""The short form of `make bench-exec` on the emulated cluster, and that nothing is left of it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.bench_exec import CLUSTER, LAYERS, measure, table
from recipes.emulated_cluster import PREFIX, Emulation, missing

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(missing() is not None, reason=f"emulated cluster: {missing()}"),
]
ROOT = Path(__file__).parents[2]


def groups_of(starter: int) -> list[str]:
    """Its cgroups; others may be measuring at the same time."""
    return [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/{PREFIX}-{starter}-*")]


def test_joint_is_faster_on_the_emulated_cluster():
    """A bar that catches regressions: 1.3 where the full form shows about 1.8."""
    spec = LAYERS | {
        "tokens": 1024, "seeds": [0], "rounds": 3, "router_skew": -4, "chunks": 2,
        "modes": [["none", "alltoall"], ["joint", "alltoall"]],
    }  # fmt: skip
    none, joint = table(measure(Emulation(2, 2, "1gbit", quota=45), spec, timeout=120))
    assert none["max_over_mean"] > 2
    assert joint["max_over_mean"] < 1.2
    assert joint["token_far_rows"] < 0.6 * none["token_far_rows"]
    assert joint["speedup"] > 1.3
    assert groups_of(os.getpid()) == []


def test_nothing_is_left_of_an_interrupted_run():
    program = "from recipes.bench_exec import *; measure(CLUSTER, LAYERS | " + repr(
        {"seeds": [0], "rounds": 1000, "router_skew": 0, "chunks": 1,
         "modes": [["none", "alltoall"]]}
    ) + ")"  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    deadline = time.monotonic() + 60
    world = CLUSTER.nodes * CLUSTER.ranks_per_node
    while len(groups_of(process.pid)) < world or not all(
        pids_in(group) for group in groups_of(process.pid)
    ):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ranks = [pid for group in groups_of(process.pid) for pid in pids_in(group)]
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert groups_of(process.pid) == []
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks)


def pids_in(group: str) -> list[str]:
    return (Path(group) / "cgroup.procs").read_text().split()
