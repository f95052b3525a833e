"""How far apart do runs drift by rounding alone?

    python -m recipes.drift --out outputs/drift.json

Every debug recipe under planner `none`, with its expert parallelism and without, which changes
nothing but the order of float sums. Losses agree until a near-tie of a router falls the other way,
and then wander. A planner that is right wanders about as far (`recipes.reproduce` says how far each
does). Runs go to outputs/drift/; a finished one is kept.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from recipes.reproduce import train_run
from topoep_titan.errors import InputError
from topoep_titan.results import RunResult, read_result, write_atomically

RECIPES = ["qwen3_debug", "glm4_moe_debug", "deepseek_v2_debug"]
AGREE = 1e-5  # relative; what parity tests ask of the first 20 steps
RANKS = 4
SETTINGS = [
    "--validator.no-enable", "--checkpoint.no-enable", "--comm.train-timeout-seconds", "900",
    "--topoep.planner", "none",
]  # fmt: skip
NO_EXPERT_PARALLELISM = ["--parallelism.expert-parallel-degree", "1"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True, help="the table, JSON")
    options = parser.parse_args(arguments)
    rows = []
    try:
        for recipe in options.recipes:
            none = run(f"{recipe}-none", recipe, options.steps, [])
            other = run(f"{recipe}-ep1", recipe, options.steps, NO_EXPERT_PARALLELISM)
            rows.append({"recipe": recipe} | drift(other, none))
            write_atomically(options.out, json.dumps({"rows": rows}, indent=1) + "\n")
    except InputError as error:
        print(f"drift: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        return error.returncode
    print(table(rows))
    return 0


def run(name: str, recipe: str, steps: int, settings: list[str]) -> RunResult:
    result = train_run(
        Path(f"toml_configs/{recipe}.toml"),
        f"drift/{name}",
        nproc=RANKS,
        steps=steps,
        settings=[*SETTINGS, *settings],
    )
    return read_result(result)


def drift(run: RunResult, none: RunResult) -> dict[str, Any]:
    """Relative differences of the training loss to ``none``, step by step."""
    difference = [
        abs(one["loss"] - other["loss"]) / other["loss"]
        for one, other in zip(run.steps, none.steps, strict=True)
    ]
    apart = next((i for i, each in enumerate(difference) if each > AGREE), len(difference))
    return {
        "steps": len(difference),
        "agreeing_steps": apart,
        "mean": statistics.fmean(difference),
        "max": max(difference),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| recipe | steps within 1e-5 | mean difference | largest |",
        "|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['recipe']} | {row['agreeing_steps']} of {row['steps']} "
            f"| {row['mean']:.3%} | {row['max']:.2%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
