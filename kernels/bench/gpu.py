"""Planner latency, row kernels, transfers and grouped matmul on one GPU; not yet run on any.

``python kernels/bench/gpu.py [--json FILE]``. Planners by replay of a CUDA graph over the paper's
Figure 11 (8, 32 and 128 ranks; experts up to 1,024), median of 200. Copies as GB/s of bytes read
plus written, beside the rate of a device-to-device copy measured here. Buffers of several hundred
MB: no cache holds them.
"""

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from topoep_kernels import planners, rows, transfers

SLOTS, PER_NODE, HIDDEN, WIDTH = 2, 8, 2048, 768
BYTES = {"token_bytes": 2 * HIDDEN, "expert_bytes": 6 * HIDDEN * WIDTH}
# Unit prices on h800_4x8 in picoseconds, and the search of `joint`, as topoep_titan has them.
FAR, NEAR = 163_840, 40_960
JOINT = {
    "prices": (70_779, FAR, NEAR, 188_743_680, 47_185_920, 30_000_000),
    "balance_weight": 60,
    "rounds": 240,
    "table": torch.tensor(
        [
            [4, 7, 0, 20, 0], [1, 4, 1, 5, 50], [12, 7, 0, 10, 0], [2, 5, 0, 55, 70],
            [5, 8, 1, 30, 10], [7, 6, 0, 5, 50], [12, 8, 1, 0, 0],
        ],
        dtype=torch.int32,
    ),
}  # fmt: skip
PLANNERS = {
    "topoep": partial(planners.plan_topoep, token_far=FAR, token_near=NEAR),
    "joint": partial(planners.plan_joint, **JOINT),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench-gpu needs a CUDA device; there is none")
    copy_rate = rate(copy_of(512 << 20), 2 * (512 << 20))
    table = [{"what": "device-to-device copy", "gb_per_s": copy_rate}]
    table += [planner_row(name, *shape) for name in PLANNERS for shape in planner_grid()]
    table += [
        {"what": what, "gb_per_s": (own := rate(call, nbytes)), "of_copy": own / copy_rate}
        for what, call, nbytes in (*row_cases(), *transfer_cases())
    ]
    table.append(grouped_matmul_row())
    for row in table:
        print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{v}" for k, v in row.items()))
    if arguments.json:
        machine = {
            "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
            "cuda": torch.version.cuda, "python": platform.python_version(),
        }  # fmt: skip
        arguments.json.write_text(json.dumps({"machine": machine, "rows": table}, indent=1) + "\n")


def planner_grid() -> list[tuple[int, int]]:
    return [(r, e) for r in (8, 32, 128) for e in (128, 256, 640, 1024)]


def planner_row(name: str, ranks: int, experts: int) -> dict:
    generator = torch.Generator().manual_seed(0)
    popularity_E = torch.randn(experts, generator=generator).mul(2).exp()
    drawn = torch.multinomial(popularity_E, ranks * 32_768, replacement=True, generator=generator)
    load_RE = torch.stack(
        [torch.bincount(part, minlength=experts) for part in drawn.view(ranks, -1)]
    ).int()
    load_RE, mains_E = load_RE.cuda(), torch.arange(experts, dtype=torch.int32).cuda()
    out = planners.empty_plan(load_RE, SLOTS)

    def plan():
        PLANNERS[name](
            load_RE, mains_E, replica_slots=SLOTS, ranks_per_node=PER_NODE, **BYTES, out=out
        )

    return {"what": f"{name}, {ranks} ranks, {experts} experts", "us": microseconds(plan)}


def row_cases() -> list[tuple[str, Callable, int]]:
    """(what, call, bytes read and written): 32,768 rows of 2,048 bfloat16."""
    tokens, top_k = 8192, 8
    index_N = torch.randint(0, tokens, (tokens * top_k,), device="cuda")
    x_TD = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    rows_ND = rows.gather(x_TD, index_N)
    bags = rows.bucket(index_N, tokens)
    weight_N = torch.rand(len(index_N), device="cuda")
    return [
        ("gather", lambda: rows.gather(x_TD, index_N), 2 * rows_ND.nbytes),
        ("combine", lambda: rows.combine(rows_ND, *bags), rows_ND.nbytes + x_TD.nbytes),
        ("weighted combine", lambda: rows.combine(rows_ND, *bags, weight_N),
         rows_ND.nbytes + x_TD.nbytes),
    ]  # fmt: skip


def transfer_cases() -> list[tuple[str, Callable, int]]:
    """Eight virtual ranks on this GPU, 16 replicas of 9.4 MB pulled by rank 0, and their sum."""
    ranks, mains, slots = 8, 16, 16
    device, part = torch.device("cuda"), HIDDEN * WIDTH
    weights = torch.randn(ranks, 3, mains, part, device=device).bfloat16()
    own = torch.empty(3, slots, part, device=device, dtype=torch.bfloat16)
    experts = torch.arange(ranks * mains, dtype=torch.int32).view(ranks, mains)
    guests = torch.full((ranks, slots), -1, dtype=torch.int32)
    guests[0] = experts[1:].flatten()[:: (ranks - 1) * mains // slots][:slots]
    expert_G = torch.cat([experts, guests], 1).flatten().to(device)
    place_E = torch.arange(ranks * mains, dtype=torch.int32, device=device)
    base_PR = transfers.addresses(
        [[weights[r, p].data_ptr() for r in range(ranks)] for p in range(3)], device
    )
    own_P = transfers.addresses([own[p].data_ptr() for p in range(3)], device)
    moved = 2 * own.nbytes

    def pull():
        transfers.pull_replicas(expert_G, place_E, base_PR, own_P, 2 * part, 0)

    total = torch.zeros(mains, part, device=device)
    region = torch.zeros(ranks, mains, part, device=device, dtype=torch.bfloat16)
    hosted = torch.cat([experts, experts[:1].expand(ranks, -1)], 1).flatten().to(device)
    summed = region.nbytes + 2 * total.nbytes
    return [
        ("pull_replicas", pull, moved),
        ("reduce_gradients", lambda: transfers.reduce_gradients(total, region, hosted, 0), summed),
    ]


def grouped_matmul_row() -> dict:
    """bfloat16, 8 experts of 2,048 rows, against one dense product of the same size."""
    rows_MD = torch.randn(16_384, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weight_XDF = torch.randn(8, HIDDEN, WIDTH, device="cuda", dtype=torch.bfloat16)
    ends = torch.arange(1, 9, device="cuda", dtype=torch.int32) * 2048
    grouped = microseconds(lambda: torch._grouped_mm(rows_MD, weight_XDF, offs=ends))
    dense = microseconds(lambda: rows_MD @ weight_XDF[0])
    return {"what": "grouped matmul", "us": grouped, "of_dense": dense / grouped}


def copy_of(nbytes: int) -> Callable:
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def rate(call: Callable, nbytes: int) -> float:
    return nbytes / microseconds(call) / 1e3


def microseconds(call: Callable, replays: int = 200) -> float:
    """Median time of a captured call on the device."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()
