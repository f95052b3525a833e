"""When does a router's structure show, and how much of the final gain does it bring by then?

    python -m recipes.emergence

Expert Coupling, "They Also Emerge Early and Stay Stable": placements and predictors fitted on the
routing of an early step, judged at the end of training. Ours are read from
results/coupling_trace.json, which ``recipes.coupling_trace`` counts on a recorded training run.
"""

import json
import sys

from recipes.common import ROOT, answer, curve, value
from topoep_titan.errors import InputError

TRACE = ROOT / "results" / "coupling_trace.json"
# name -> (table, the value that grows, what it is without any fit)
GAINS = {
    "placement": ("placement", "rows removed at step", "by dedup alone"),
    "token shuffling": ("token shuffling", "locality at step", "without"),
}


def main() -> int:
    return answer(
        question,
        figure="Coupling, emergence",
        kind="counted on recorded routing",
        text="When does a router's structure show, and how much of the final gain does it bring?",
        name="emergence",
    )


def question() -> dict:
    try:
        tables = json.loads(TRACE.read_text())["tables"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{TRACE} holds no tables ({error}); run recipes.coupling_trace") from None
    shares, curves, rows = {}, [], []
    for name, (table, grows, floor) in GAINS.items():
        steps = [row["fitted up to step"] for row in tables[table]]
        shares[name] = dict(zip(steps, share_of_final(tables[table], grows, floor)))
        curves.append(curve("Share of the final gain", name, steps, [*shares[name].values()]))
    pearson = {row["fitted up to step"]: row["Pearson of co-selection"]
               for row in tables["placement"]}  # fmt: skip
    curves.append(curve("Pearson of co-selection with the end", "co-selection", [*pearson],
                        [*pearson.values()]))  # fmt: skip
    for step, correlation in pearson.items():
        rows.append([step, *(shares[name].get(step) for name in GAINS), correlation])
    last = max(pearson)
    return {
        "values": [
            value("share of the final placement gain at step 200 (text: step 199)", 0.5,
                  shares["placement"][200], why=WHY),
            value("share of the final shuffling gain at step 200", None,
                  shares["token shuffling"][200], why="the text says: a similar trajectory"),
            value("Pearson of co-selection with the end, half way", None, pearson[400]),
        ],
        "conditions": f"a debug model (32 experts, top-4, 8 ranks) trained for {last} steps of "
        "1,024 tokens; the text's models train for 2.1 billion tokens, some 2,000 steps. A step "
        "of ours sees far fewer tokens, so steps are compared and tokens are not.",
        "tables": [
            {"caption": "Fitted up to a step, judged at the end: share of what a fit at the end "
             "gains.",
             "columns": ["step", "placement", "token shuffling", "Pearson"], "rows": rows}
        ],
        "curves": curves,
        "axes": ["fitted up to step", ""],
    }  # fmt: skip


def share_of_final(table: list[dict], grows: str, floor: str) -> list[float]:
    """Of each row, (its value - without) / (the last row's - without)."""
    key = next(key for key in table[0] if key.startswith(grows))
    gains = [row[key] - row[floor] for row in table]
    return [gain / gains[-1] for gain in gains]


WHY = "another model, corpus and batch; ours is still learning when its recording ends"

if __name__ == "__main__":
    sys.exit(main())
