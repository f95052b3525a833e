"""Does balancing leave the training loss alone?

    make reproduce-qwen && python -m recipes.loss_equivalence

TopoEP paper, Figure 14: Qwen3-30B-A3B, 10,000 steps, mean 0.088 % and maximum 0.407 % relative
difference. Ours: the runs of ``make reproduce-qwen`` (debug size, CPU), as committed in results/.
"""

import json
import sys

from recipes.common import PUBLISHED, ROOT, answer, value
from topoep_titan.errors import InputError

RUNS = ROOT / "results" / "reproduce_qwen.json"


def main() -> int:
    return answer(
        question,
        figure="TopoEP Fig. 14",
        kind="measured, debug size",
        text="Does balancing leave the training loss alone?",
        name="loss_equivalence",
    )


def question() -> dict:
    try:
        runs = json.loads(RUNS.read_text())["runs"]
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise InputError(
            f"{RUNS} cannot be read ({error}); copy outputs/reproduce-qwen/results.json there"
        ) from None
    published, values = PUBLISHED["figure_14"], []
    for run in runs:
        if compared := run["compared_with_none"]:
            for name in ("mean", "max"):
                what = f"{run['planner']}: {name} relative difference to none"
                ours = 100 * compared[f"{name}_difference"]
                values.append(
                    value(what, 100 * published[f"{name}_difference"], ours, "%", why=WHY)
                )
    return {
        "values": values,
        "conditions": "Qwen3 debug size, 4 gloo ranks, fp32, natural routing, "
        f"{runs[0]['summary']['steps']} steps; the paper: Qwen3-30B-A3B, 10,000 steps.",
        "tables": [],
        "curves": [],
    }


WHY = (
    "a near-tie of a router flips and runs drift apart as rounding alone makes them: none on 2 "
    "instead of 4 ranks leaves itself by 0.164 % on average"
)

if __name__ == "__main__":
    sys.exit(main())
