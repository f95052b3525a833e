"""Native row kernels against the PyTorch expressions they replace: ratios on one CPU thread.

``python kernels/bench/rows.py [--json FILE]``: one source of the published shapes (Qwen3-30B-A3B on
32 ranks: E 128, K 8, D 2048, 2 replica slots), float32 and bfloat16 rows. The two sides alternate;
each ratio is of the shortest times, which a busy machine disturbs least.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from topoep_kernels import reference, rows

RANKS, EXPERTS, TOP_K, WIDTH, TOKENS, SLOTS = 32, 128, 8, 2048, 2048, 6
REPEATS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = [measure(*case) for case in cases()]
    print(f"{'operation':34} {'PyTorch us':>11} {'native us':>10} {'ratio':>6}")
    for row in table:
        print(f"{row['operation']:34} {row['torch_us']:11.0f} {row['native_us']:10.0f} "
              f"{row['ratio']:6.2f}")  # fmt: skip
    if arguments.json:
        machine = {"processor": platform.processor() or platform.machine(), "threads": 1,
                   "torch": torch.__version__, "python": platform.python_version()}  # fmt: skip
        shape = {"ranks": RANKS, "experts": EXPERTS, "top_k": TOP_K, "hidden": WIDTH,
                 "tokens": TOKENS, "slots_per_rank": SLOTS}  # fmt: skip
        arguments.json.write_text(
            json.dumps({"rows": table, "shape": shape, "machine": machine}, indent=1) + "\n"
        )


def cases() -> list[tuple[str, str, tuple]]:
    """(what, operator, arguments)."""
    generator = torch.Generator().manual_seed(0)
    logits_TE = torch.randn(TOKENS, EXPERTS, generator=generator) + torch.randn(EXPERTS)
    ids_TK = logits_TE.topk(TOP_K).indices
    counts_E = torch.bincount(ids_TK.flatten(), minlength=EXPERTS)
    half_E = counts_E // 2  # every other expert's half runs in a replica
    half_E[::2] = 0
    own_Rp = torch.arange(EXPERTS).view(RANKS, -1)
    guests_Rp = (own_Rp[:, :2] + EXPERTS // 2 + 1) % EXPERTS
    expert_G = torch.cat([own_Rp, guests_Rp], 1).flatten().int()
    split_Rp = torch.cat([counts_E[own_Rp] - half_E[own_Rp], half_E[guests_Rp]], 1)
    missing_E = half_E.clone()
    missing_E[guests_Rp.flatten()] = 0  # halves that no guest took stay with the main
    split_Rp[:, : own_Rp.shape[1]] += missing_E[own_Rp]
    slot_TK = reference.assign(ids_TK, expert_G, split_Rp.flatten().int(), EXPERTS)
    rank_A = slot_TK.flatten() // SLOTS
    row_A = torch.arange(TOKENS).repeat_interleave(TOP_K)
    rows_out = len(torch.unique(rank_A * TOKENS + row_A))
    order_A, _, index_N = reference.dedup(rank_A, row_A, RANKS, rows_out)
    found = [
        ("counts and order of experts", "bucket", (ids_TK.flatten(), EXPERTS)),
        ("order of slots", "bucket", (slot_TK.flatten(), RANKS * SLOTS)),
        ("slots of assignments (cut rule)", "assign",
         (ids_TK, expert_G, split_Rp.flatten().int(), EXPERTS)),
        ("dedup index, one row a rank", "dedup", (rank_A, row_A, RANKS, rows_out)),
        ("rows to each rank", "count_rows", (slot_TK, RANKS, SLOTS)),
    ]  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        x_TD = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
        arrived_ND = x_TD[index_N]
        bags = reference.bucket(index_N, TOKENS)
        score_N = torch.rand(rows_out, generator=generator)
        found += [
            (f"gather to send order, {name}", "gather", (x_TD, order_A // TOP_K)),
            (f"combine, {name}", "combine", (arrived_ND, *bags, None)),
            (f"weighted combine, {name}", "combine", (arrived_ND, *bags, score_N)),
        ]
    return found


def measure(what: str, operator: str, arguments: tuple) -> dict:
    expression = getattr(reference, operator)
    if operator == "combine" and arguments[3] is None:  # as execution had it
        expression = embedding_bag
    sides = {"torch": expression, "native": getattr(rows, operator)}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(REPEATS + 1):  # the first warms up
        order = list(sides) if repeat % 2 else list(sides)[::-1]  # neither always comes second
        for side in order:
            times[side].append(seconds(sides[side], arguments))
    shortest = {side: min(values[1:]) * 1e6 for side, values in times.items()}
    ratio = shortest["torch"] / shortest["native"]
    return {"operation": what, "operator": operator, "ratio": ratio} | {
        f"{side}_us": value for side, value in shortest.items()
    }


def embedding_bag(rows_ND, order_N, offset_S, _):
    return F.embedding_bag(order_N, rows_ND, offset_S, mode="sum", include_last_offset=True)


def seconds(call: Callable, arguments: tuple) -> float:
    started = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
