"""Measures the rates of a cluster file between the ranks of a job: ``--write-cluster``.

Under torchrun the ranks that it started measure, on every machine; alone, this process starts some
on its own machine. Rates are what the cost model calls them: bytes/s that one rank sends (and
receives) while every rank of the group does. Needs at least two ranks.
"""

import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torchtitan.tools.utils import device_module, device_type

from topoep_titan.cluster import Cluster, ModelDims, load_cluster
from topoep_titan.errors import InputError
from topoep_titan.planning import planner_named
from topoep_titan.planning.plan import contiguous_mains
from topoep_titan.planning.workloads import load_of, skew
from topoep_titan.results import write_atomically
from topoep_titan.titan.device import local_ranks

BYTES = 2**24 if device_type == "cpu" else 2**28  # that a rank sends to all others together
ROWS, WIDTH = (512, 512) if device_type == "cpu" else (8192, 4096)
REPEATS = 7
DEFAULT_RANKS = 4


@dataclass(frozen=True)
class Rates:
    flops: float
    bw_near: float
    lat_near: float
    bw_far: float | None  # None on one node
    lat_far: float | None
    plan_us: float


def write_cluster(path: Path, nproc: int | None) -> int:
    """Measure, and write the file on rank 0. Raises InputError where it cannot be written."""
    if path.suffix != ".toml" or not path.parent.is_dir():
        raise InputError(f"--write-cluster {path}: give a .toml file in an existing folder")
    if "RANK" not in os.environ:
        devices = None if device_type == "cpu" else torch.accelerator.device_count()
        return _launch(path, nproc or devices or DEFAULT_RANKS, devices)
    backend = "gloo" if device_type == "cpu" else "nccl"
    if device_type != "cpu":
        device_module.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    try:
        per_node = local_ranks() or dist.get_world_size()
        rates = measure(per_node)
        if dist.get_rank() == 0:
            text = cluster_text(path.stem, rates, dist.get_world_size() // per_node, per_node)
            write_atomically(path, text)
            load_cluster(path)  # what is written can be read
            print(f"{path}\n{text}", end="")
    finally:
        dist.destroy_process_group()
    return 0


def _launch(path: Path, ranks: int, devices: int | None) -> int:
    if ranks < 2:
        raise InputError(f"rates between ranks need at least 2 ranks, not {ranks}; give --nproc")
    if devices is not None and ranks > devices:
        raise InputError(f"--nproc is {ranks}, and this machine has {devices} devices; give fewer")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "topoep_titan.cli"]
    command += ["doctor", "--write-cluster", str(path)]
    return subprocess.run(command, check=False).returncode and 1


def measure(per_node: int) -> Rates:
    """Collective over the default group, whose ranks fill nodes of ``per_node`` in order."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if ranks < 2 or ranks % per_node:
        raise InputError(f"{ranks} ranks do not fill nodes of {per_node}, at least two in all")
    nodes = [list(range(start, start + per_node)) for start in range(0, ranks, per_node)]
    near = _own_group(nodes, rank) if per_node > 1 else None
    far = _own_group([list(node) for node in zip(*nodes)], rank) if len(nodes) > 1 else None
    bw_far, lat_far = _exchange_rate(far) if far else (None, None)
    bw_near, lat_near = _exchange_rate(near) if near else (bw_far, lat_far)
    return Rates(
        flops=_flops(),
        bw_near=bw_near,
        lat_near=lat_near,
        bw_far=bw_far,
        lat_far=lat_far,
        plan_us=_plan_us(ranks, per_node),
    )


def _own_group(groups: list[list[int]], rank: int) -> dist.ProcessGroup:
    return next(
        group
        for members, group in [(members, dist.new_group(members)) for members in groups]
        if rank in members
    )


def _exchange_rate(group: dist.ProcessGroup) -> tuple[float, float]:
    """(bytes/s a rank sends to the others, seconds of an empty exchange); the slowest rank's."""
    ranks = dist.get_world_size(group)
    share = BYTES // (ranks - 1)

    def exchange(size: int) -> Callable[[], None]:
        sent = torch.zeros(size * ranks, dtype=torch.uint8, device=device_type)
        received = torch.empty_like(sent)
        return lambda: dist.all_to_all_single(received, sent, group=group)

    latency, seconds = _slowest(exchange(1)), _slowest(exchange(share))
    # A rank's own part stays in its memory: (ranks - 1) shares travel.
    return share * (ranks - 1) / max(seconds - latency, 1e-9), latency


def _flops() -> float:
    dtype = torch.float32 if device_type == "cpu" else torch.bfloat16
    # Random, because a GPU draws less power for constants and then clocks higher than in training.
    left = torch.randn(ROWS, WIDTH, dtype=dtype, device=device_type)
    weight = torch.randn(4, WIDTH, WIDTH, dtype=dtype, device=device_type)
    ends = torch.arange(1, 5, dtype=torch.int32, device=device_type) * (ROWS // 4)
    seconds = _slowest(lambda: torch._grouped_mm(left, weight, offs=ends))
    return 2 * ROWS * WIDTH * WIDTH / seconds


def _plan_us(ranks: int, per_node: int) -> float:
    """A plan of `joint` for 8 experts a rank of Qwen3-30B-A3B's widths, on the host."""
    load_RE = load_of(skew(8 * ranks, 8, ranks, 1024, router_skew=-4, seed=0), 8 * ranks)
    cluster = load_cluster("h800_4x8").resized(ranks, per_node)
    planner, mains = planner_named("joint"), contiguous_mains(ranks, 8 * ranks)
    arguments = {"main_E": mains, "cluster": cluster, "model_dims": ModelDims(2048, 768)}
    return 1e6 * _slowest(lambda: planner(load_RE, replica_slots=2, **arguments))


def _slowest(call: Callable[[], object]) -> float:
    """Median seconds of a call that all ranks make at once; the maximum over ranks."""
    call()
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        started = time.perf_counter()
        call()
        device_module.synchronize()
        seconds.append(time.perf_counter() - started)
    slowest = torch.tensor(statistics.median(seconds), dtype=torch.float64, device=device_type)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def cluster_text(name: str, rates: Rates, nodes: int, per_node: int) -> str:
    """The TOML, each rate with how it was measured."""
    dtype = "fp32" if device_type == "cpu" else "bf16"
    one_node = rates.bw_far is None
    far = "one node: not measured, as near" if one_node else "all-to-all of one rank a node"
    bw_far = rates.bw_near if one_node else rates.bw_far
    lat_far = rates.lat_near if one_node else rates.lat_far
    near = "all-to-all within a node" if per_node > 1 else "one rank a node: as far"
    cluster = Cluster(
        name=name,
        nodes=nodes,
        ranks_per_node=per_node,
        flops=rates.flops,
        bw_far=bw_far,
        bw_near=rates.bw_near,
        lat_far=lat_far,
        lat_near=rates.lat_near,
        plan_us=rates.plan_us,
    )
    return (
        f"# Measured by `topoep doctor --write-cluster` on {platform.machine()}, "
        f"{device_module.get_device_name()},\n"
        f"# {datetime.date.today()}, {nodes} x {per_node} ranks, all at once; "
        f"medians of {REPEATS}, slowest rank.\n"
        f'name = "{cluster.name}"\n'
        f"nodes = {cluster.nodes}\n"
        f"ranks_per_node = {cluster.ranks_per_node}\n"
        f"flops = {cluster.flops:.3g}  # {dtype} grouped matmul, {ROWS} x {WIDTH} x {WIDTH}\n"
        f"bw_far = {cluster.bw_far:.3g}  # bytes/s: {far}\n"
        f"bw_near = {cluster.bw_near:.3g}  # bytes/s: {near}, {BYTES} bytes a rank\n"
        f"lat_far = {cluster.lat_far:.3g}  # seconds: the same, one byte a pair\n"
        f"lat_near = {cluster.lat_near:.3g}  # seconds: the same, one byte a pair\n"
        f"plan_us = {cluster.plan_us:.3g}  # a plan of joint, 8 experts a rank, on the host\n"
    )
