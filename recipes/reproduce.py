"""Train one recipe under several planners, alike in everything else, and write the report.

    python -m recipes.reproduce toml_configs/qwen3_debug.toml --name reproduce-qwen \\
        --nproc 4 --steps 100 --planners none topoep joint

Question: does balancing leave the loss alone, and what does it do to load and traffic? (TopoEP
paper, Figures 13, 14 and 16.) Every run starts from the same parameters and sees the same batches
under the same schedule. Runs go to outputs/NAME/<planner>; a finished one is kept, an interrupted
one goes on. The report is outputs/NAME/report.html (and .md), its numbers results.json; committed
answers to the papers' other questions (results/figures) are appended.
"""

import argparse
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from topoep_titan.errors import InputError
from topoep_titan.planning import planner_named
from topoep_titan.reports.page import write_report
from topoep_titan.reports.published import read_answers
from topoep_titan.results import read_result

OUTPUTS = Path("outputs")
FIGURES = Path(__file__).resolve().parents[1] / "results" / "figures"  # make figures


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--name", required=True, help="outputs/NAME")
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--planners", nargs="+", default=["none", "topoep", "joint"])
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through finally
    try:
        for planner in options.planners:
            planner_named(planner)
        results = [
            read_result(
                train_run(
                    options.recipe,
                    f"{options.name}/{planner}",
                    nproc=options.nproc,
                    steps=options.steps,
                    settings=["--topoep.planner", planner],
                )
            )
            for planner in options.planners
        ]
        if any(result.routing != "natural" for result in results):
            raise InputError(
                f"{options.recipe} sets topoep.router_skew: losses under synthetic routing mean "
                "nothing; reproduce with a recipe of natural routing"
            )
        commits = {result.name: result.commit for result in results}
        if len(set(commits.values())) > 1:
            told = ", ".join(f"{name} by {commit}" for name, commit in commits.items())
            print(f"note: trained by different commits: {told}", file=sys.stderr)
        command = ["python", "-m", "recipes.reproduce", options.recipe, "--name", options.name]
        command += ["--nproc", options.nproc, "--steps", options.steps, "--planners"]
        page = write_report(
            results,
            OUTPUTS / options.name,
            title=f"{options.name}: {' against '.join(options.planners)}",
            command=shlex.join(map(str, command + options.planners)),
            answers=read_answers(FIGURES),
        )
    except InputError as error:
        print(f"reproduce: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        if error.returncode != 2:
            return 1
        print(f"(to start anew: rm -r {OUTPUTS / options.name})", file=sys.stderr)
        return 2
    print(f"report: {page}\nnumbers: {page.with_name('results.json')}")
    return 0


def train_run(recipe: Path, name: str, *, nproc: int, steps: int, settings: list[str]) -> Path:
    """Train outputs/``name``, or go on, or find it done; its result. Raises CalledProcessError."""
    command = [sys.executable, "train.py", str(recipe), "--name", name, "--nproc", str(nproc)]
    command += [*settings, "--training.steps", str(steps)]
    process = subprocess.Popen(command)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:  # it ends the ranks, and says how to go on
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code:
        raise subprocess.CalledProcessError(code, command)
    return OUTPUTS / name / "result.json"


if __name__ == "__main__":
    sys.exit(main())
