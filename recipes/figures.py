"""Answer every question of the two papers that needs no training, and write one report.

    python -m recipes.figures [NAME...]        (= make figures)

Runs the programs of ``PROGRAMS`` one after the other, each in its own process, writes the table of
recipes/README.md from their results, and the page outputs/figures/report.html (and .md).
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from recipes.common import FIGURES, ROOT, shown
from topoep_titan.errors import InputError
from topoep_titan.reports.published import read_answers, write_answers
from topoep_titan.results import write_atomically

PROGRAMS = (
    "model_shapes", "replica_placement", "pipeline_timeline", "two_stage_example", "slot_budget",
    "solver_latency", "latency_breakdown", "throughput_by_skew", "planner_throughput",
    "loss_equivalence", "execution_location", "coupling_speedup", "scale_study",
)  # fmt: skip
# Needs a recorded trace: run by hand, its result is kept and reported.
BY_HAND = ("expert_skew",)
MARKERS = "<!-- results -->", "<!-- end of results -->"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(PROGRAMS)}")
    parser.add_argument("--out", type=Path, default=Path("outputs/figures"))
    options = parser.parse_args(arguments)
    try:
        for name in options.names:
            if name not in PROGRAMS:
                raise InputError(f"unknown program {name!r}; choose from: {', '.join(PROGRAMS)}")
        for index, name in enumerate(chosen := options.names or PROGRAMS):
            started = time.monotonic()
            print(f"[{index + 1}/{len(chosen)}] {name}", flush=True)
            subprocess.run([sys.executable, "-m", f"recipes.{name}"], check=True, cwd=ROOT)
            print(f"  {time.monotonic() - started:.0f} s", flush=True)
        answers = read_answers(FIGURES)
        page = write_answers(answers, options.out, title="The two papers' figures, and ours")
        write_readme(answers)
    except InputError as error:
        print(f"figures: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        return error.returncode
    print(f"report: {page}")
    return 0


def write_readme(answers: list[dict]) -> None:
    """One row for each figure or table, between the markers of recipes/README.md."""
    path = ROOT / "recipes" / "README.md"
    before, _, rest = path.read_text().partition(MARKERS[0])
    after = rest.partition(MARKERS[1])[2]
    lines = [
        "| figure | question | command | minutes | published | ours | why they differ |",
        "|---|---|---|---|---|---|---|",
    ]
    for answer in answers:
        # The first values that have both; the result file and the report hold all.
        both = [v for v in answer["values"] if v["published"] is not None and v["ours"] is not None]
        rows = both[:3] or answer["values"][:2]
        why = next((v["why"] for v in rows if v["why"]), "")
        published, ours = (
            "; ".join(f"{shown(v[key])} {v['unit']}".strip() for v in rows)
            for key in ("published", "ours")
        )
        minutes = max(answer["seconds"] / 60, 0.1)
        lines.append(
            f"| {answer['figure']} | {answer['question']} ({answer['kind']}) | "
            f"`{answer['command']}` | {minutes:.1f} | {published} | {ours} | {why} |"
        )
    table = "\n".join(lines)
    write_atomically(path, f"{before}{MARKERS[0]}\n{table}\n{MARKERS[1]}{after}")


if __name__ == "__main__":
    sys.exit(main())
