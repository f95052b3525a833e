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
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from topoep_titan.errors import InputError
from topoep_titan.planning import planner_named
from topoep_titan.reports.page import write_report
from topoep_titan.reports.published import read_answers
from topoep_titan.results import read_result
from topoep_titan.titan.step_log import StepLog

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
    """Check and train outputs/``name``; the path of its result. Raises CalledProcessError."""
    label, folder = Path(name).name, OUTPUTS / name
    settings = [*settings, "--training.steps", str(steps)]
    train = ["train.py", str(recipe), "--name", name]
    check = [sys.executable, *train, "--check", "--nproc", str(nproc), *settings]
    subprocess.run(check, check=True, stdout=subprocess.DEVNULL)
    if (folder / "result.json").exists():
        print(f"{label}: finished earlier, {folder}", flush=True)
        return folder / "result.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", str(nproc), *train, *settings]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    with log.open("a") as file:
        process = subprocess.Popen(launch, stdout=file, stderr=file, start_new_session=True)
        try:
            _show_progress(process, StepLog(folder), label, steps)
        finally:  # also on Ctrl-C: no rank may be left running
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    if process.returncode:
        print(f"\n{label} failed; from {log}:", file=sys.stderr)
        lines = log.read_text().splitlines()
        launcher = next((i for i, line in enumerate(lines) if "ChildFailedError" in line), None)
        told = [line for line in lines[:launcher] if "Error" in line]  # of the ranks themselves
        print("\n".join(told[-3:] or lines[-30:]), file=sys.stderr)
        raise subprocess.CalledProcessError(1, launch)
    return folder / "result.json"


def _show_progress(process: subprocess.Popen, steps: StepLog, label: str, total: int) -> None:
    """One line, rewritten as steps arrive (on a terminal; in a log, a line every tenth step)."""
    started, shown, first = time.monotonic(), None, None
    print(f"{label}: starting", end="", flush=True)
    while process.poll() is None:
        time.sleep(0.5)
        training, _ = steps.read()
        if not training or training[-1]["step"] == shown:
            continue
        record = training[-1]
        shown = record["step"]
        first = first or (shown, time.monotonic())
        pace = (time.monotonic() - first[1]) / max(shown - first[0], 1)
        line = (
            f"{label}: step {shown}/{total}  loss {record['loss']:.4f}  "
            f"max/mean {record['max_over_mean_before']:.2f} -> {record['max_over_mean']:.2f}  "
            f"{record['tokens_per_second']:,.0f} tokens/s  {pace * (total - shown):.0f} s left"
        )
        if sys.stdout.isatty():
            print(f"\r\033[K{line}", end="", flush=True)
        elif shown % 10 == 0 or shown == total:
            print(f"\n{line}", end="", flush=True)
    print(f"\n{label}: {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
