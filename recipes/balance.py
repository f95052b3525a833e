"""Train each family under each way of balancing its router, and report how level experts become.

    python -m recipes.balance --out outputs/balance.json

Question: does a router that trains from scratch collapse, and does ``[model] balance`` prevent it?
One process a run, planner none: replicas change no expert's load. Every run of a family starts from
the same parameters and sees the same batches. Runs go to outputs/balance/; a finished one is kept.

*max/mean* is the busiest expert's assignments over the mean expert's in one step and layer: 1 is
level, E / K is collapsed. Reported over the last WINDOW steps: mean over layers, and worst layer.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from recipes.reproduce import train_run
from topoep_titan.errors import InputError
from topoep_titan.results import RunResult, read_result, write_atomically

RECIPES = ["qwen3_debug", "glm4_moe_debug", "deepseek_v2_debug"]
BALANCES = ["none", "bias", "aux"]
WINDOW = 50
CURVE = 10  # every tenth step of the curve is kept
SETTINGS = [
    "--topoep.planner", "none", "--parallelism.expert-parallel-degree", "1",
    "--parallelism.pipeline-parallel-degree", "1", "--training.local-batch-size", "8",
    "--topoep.ranks-per-node", "1", "--checkpoint.no-enable", "--validator.no-enable",
]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--balances", nargs="+", default=BALANCES, choices=BALANCES)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, required=True, help="the table, JSON")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through finally
    rows = []
    try:
        for recipe in options.recipes:
            for balance in options.balances:
                result = train_run(
                    Path(f"toml_configs/{recipe}.toml"),
                    f"balance/{recipe}-{balance}",
                    nproc=1,
                    steps=options.steps,
                    settings=[*SETTINGS, "--model.balance", balance],
                )
                rows.append(summary(read_result(result)))
                # After every run: what stops later ones loses none of these.
                write_atomically(options.out, json.dumps({"rows": rows}, indent=1) + "\n")
    except InputError as error:
        print(f"balance: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        return 2 if error.returncode == 2 else 1
    print(table(rows))
    return 0


def summary(result: RunResult) -> dict[str, Any]:
    """One row of the table. Values are expert max/mean unless they say otherwise."""
    last = result.steps[-WINDOW:]
    worst = max(
        statistics.fmean(step["layers"][layer]["expert_max_over_mean"] for step in last)
        for layer in range(len(last[0]["layers"]))
    )
    model = result.config["model"]
    return {
        "recipe": result.recipe,
        "balance": model["balance"],
        "steps": len(result.steps),
        "window": len(last),
        "max_over_mean_first_step": result.steps[0]["expert_max_over_mean"],
        "max_over_mean": statistics.fmean(step["expert_max_over_mean"] for step in last),
        "max_over_mean_worst_layer": worst,
        "collapsed_would_be": model["num_experts"] / model["top_k"],
        "loss": statistics.fmean(step["loss"] for step in last),
        "curve": [step["expert_max_over_mean"] for step in result.steps[::CURVE]],
        "commit": result.commit,
        "versions": result.versions,
        "hardware": result.hardware,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| recipe | balance | max/mean, first step | last steps, mean over layers | worst layer "
        "| collapsed would be | loss, last steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['recipe']} | {row['balance']} | {row['max_over_mean_first_step']:.2f} "
            f"| {row['max_over_mean']:.2f} | {row['max_over_mean_worst_layer']:.2f} "
            f"| {row['collapsed_would_be']:.1f} | {row['loss']:.3f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
