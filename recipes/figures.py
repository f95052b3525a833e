"""Answer every question of the two papers that needs no training, and write one report.

    python -m recipes.figures [NAME...]        (= make figures)

Runs the programs of ``PROGRAMS`` one after the other, each in its own process, writes the tables of
the READMEs from their results, and the page outputs/figures/report.html (and .md).
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from recipes import readme
from recipes.common import FIGURES, ROOT
from topoep_titan.errors import InputError
from topoep_titan.reports.published import read_answers, write_answers

PROGRAMS = (
    "model_shapes", "replica_placement", "pipeline_timeline", "measured_timeline",
    "two_stage_example", "slot_budget", "solver_latency", "latency_breakdown",
    "throughput_by_skew", "planner_throughput", "loss_equivalence", "execution_location",
    "coupling_speedup", "emergence", "scale_study", "coupling_scale",
)  # fmt: skip
# Needs a recorded trace: run by hand, its result is kept and reported.
BY_HAND = ("expert_skew",)


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
        page = write_answers(
            read_answers(FIGURES), options.out, title="The two papers' figures, and ours"
        )
        readme.main()
    except InputError as error:
        print(f"figures: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        return error.returncode
    print(f"report: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
