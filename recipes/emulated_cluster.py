"""An emulated cluster on one Linux machine: nodes, a slow link between them, ranks of fixed speed.

A node is an anonymous network namespace, which vanishes with its last process; two nodes share a
rate-limited virtual link; a rank is one process with a CPU quota, so that ranks that share a core
cannot lend each other idle time. Needs root, iproute2 and util-linux: ``missing()`` says what is
not there. Nothing is left behind when the starter ends, also by a signal; after ``kill -9`` empty
cgroups stay, which the next start removes.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from data.tasks import die_with_parent

DEVICE, SUBNET, PORT = "e0", "10.77.0", 29500  # private to the namespaces
PERIOD_US = 10_000
CGROUPS = Path("/sys/fs/cgroup")
PREFIX = "topoep-emulated"


@dataclass(frozen=True)
class Emulation:
    nodes: int  # 1 or 2
    ranks_per_node: int
    rate: str  # of the link between two nodes, as tc writes it
    quota: int  # per cent of a core, for each rank


def missing() -> str | None:
    """Why this machine cannot emulate a cluster, or None."""
    if os.geteuid() != 0:
        return "it needs root (network namespaces and CPU quotas)"
    lacking = [tool for tool in ("ip", "tc", "unshare", "nsenter") if not shutil.which(tool)]
    if lacking:
        return f"the tools {', '.join(lacking)} are not installed (iproute2, util-linux)"
    try:
        _cgroup(0, 10).rmdir()
        subprocess.run(["unshare", "--net", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"namespaces or CPU quotas are not available here ({error})"
    return None


def run_ranks(emulation: Emulation, command: list[str], logs: Path, timeout: float) -> None:
    """Run ``command`` once a rank (RANK and so on in the environment) until all have ended.

    Raises RuntimeError with the end of the log of a rank that failed. Tears everything down.
    """
    # Signals are noted and obeyed while waiting: one that struck between starting a process and
    # noting it would leave the process behind.
    caught: list[int] = []
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
        signals.append(signal.SIGHUP)
    former = [signal.signal(name, lambda number, _: caught.append(number)) for name in signals]
    world = emulation.nodes * emulation.ranks_per_node
    processes, groups = [], []
    try:
        _remove_stale_cgroups()
        nodes = []
        for _ in range(emulation.nodes):
            nodes.append(_start(["unshare", "--net", "sleep", "infinity"]))
            processes.append(nodes[-1])
        _connect(nodes, emulation.rate)
        ranks = []
        for rank in range(world):
            groups.append(_cgroup(rank, emulation.quota))
            ranks.append(_start_rank(rank, emulation, nodes, groups[-1], command, logs))
            processes.append(ranks[-1])
        _wait(ranks, logs, time.monotonic() + timeout, caught)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        for group in groups:
            group.rmdir()
        for name, handler in zip(signals, former):
            signal.signal(name, handler)


def _wait(ranks: list[subprocess.Popen], logs: Path, deadline: float, caught: list[int]) -> None:
    while any(rank.poll() is None for rank in ranks):
        if caught:
            print(f"stopped by {signal.Signals(caught[0]).name}", file=sys.stderr)
            sys.exit(128 + caught[0])
        failed = [i for i, rank in enumerate(ranks) if rank.poll()]
        if failed or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for i, rank in enumerate(ranks):
        if rank.poll() != 0:
            why = "did not end in time" if rank.poll() is None else f"ended with {rank.returncode}"
            tail = (logs / f"rank{i}.log").read_text()[-2000:]
            raise RuntimeError(f"rank {i} {why}:\n{tail}")


def _start(command: list[str], *, before=lambda: None, **options) -> subprocess.Popen:
    def prepare() -> None:
        die_with_parent()
        before()

    return subprocess.Popen(command, preexec_fn=prepare, **options)


def _inside(node: subprocess.Popen) -> list[str]:
    return ["nsenter", "-t", str(node.pid), "-n"]


def _connect(nodes: list[subprocess.Popen], rate: str) -> None:
    own = os.readlink("/proc/self/ns/net")
    while any(os.readlink(f"/proc/{node.pid}/ns/net") == own for node in nodes):
        time.sleep(0.005)  # unshare has not got there yet

    def run(node: subprocess.Popen, line: str) -> None:
        subprocess.run([*_inside(node), *line.split()], check=True)

    for node in nodes:
        run(node, "ip link set lo up")  # pairs of one node talk over it
    if len(nodes) == 1:
        return
    run(nodes[0], f"ip link add {DEVICE} type veth peer name {DEVICE} netns {nodes[1].pid}")
    for i, node in enumerate(nodes):
        run(node, f"ip addr add {SUBNET}.{i + 1}/24 dev {DEVICE}")
        run(node, f"ip link set {DEVICE} up")
        run(node, f"tc qdisc add dev {DEVICE} root tbf rate {rate} burst 128kb latency 50ms")


def _start_rank(
    rank: int,
    emulation: Emulation,
    nodes: list[subprocess.Popen],
    group: Path,
    command: list[str],
    logs: Path,
) -> subprocess.Popen:
    node, local = divmod(rank, emulation.ranks_per_node)
    device, master = (DEVICE, f"{SUBNET}.1") if len(nodes) > 1 else ("lo", "127.0.0.1")
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(emulation.nodes * emulation.ranks_per_node),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(emulation.ranks_per_node),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": device,
        "OMP_NUM_THREADS": "1",
    }

    def enter() -> None:  # before the process has threads
        (group / "cgroup.procs").write_text(str(os.getpid()))
        os.sched_setaffinity(0, {local % (os.cpu_count() or 1)})

    with (logs / f"rank{rank}.log").open("w") as log:
        return _start(
            [*_inside(nodes[node]), *command],
            before=enter, env=environment, stdout=log, stderr=log,
        )  # fmt: skip


def _cgroup_root() -> Path:
    return CGROUPS if (CGROUPS / "cgroup.controllers").exists() else CGROUPS / "cpu"


def _cgroup(rank: int, quota: int) -> Path:
    """A new cgroup of ``quota`` per cent of a core, with so much weight that the quota is what
    limits it also on a busy machine."""
    root = _cgroup_root()
    group = root / f"{PREFIX}-{os.getpid()}-{rank}"
    group.mkdir()
    quota_us = quota * PERIOD_US // 100
    if root == CGROUPS:  # version 2
        (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        (group / "cpu.weight").write_text("10000")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        (group / "cpu.shares").write_text("100000")
    return group


def _remove_stale_cgroups() -> None:
    for group in _cgroup_root().glob(f"{PREFIX}-*"):
        if not Path(f"/proc/{group.name.split('-')[2]}").exists():
            group.rmdir()
