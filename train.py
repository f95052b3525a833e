"""Train one recipe:  python train.py RECIPE [--nproc N] [--name X] [--section.key value]

It checks recipe, layout, data and output folder, exits with 2 and one message when something is
wrong, and then starts N ranks on this machine (default: as many as the recipe says). With --check
it stops before. Across machines: torchrun ... train.py RECIPE, the same on each of them.
"""

import argparse
import logging
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

from topoep_titan.titan import device

device.install()  # before anything else of torchtitan is imported

import torch.distributed as dist
from torchtitan.tools.logging import init_logger, logger

from data.tasks import die_with_parent
from topoep_titan.errors import InputError
from topoep_titan.titan.checks import check_job
from topoep_titan.titan.job import complete, load_job, resolved_table
from topoep_titan.titan.launch import launch, leave
from topoep_titan.titan.layout import check_layout
from topoep_titan.titan.memory import memory_of_ranks
from topoep_titan.titan.resume import resume_from
from topoep_titan.titan.run_folder import RESULT, open_run, run_folder, run_state


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, usage="train.py RECIPE [options] [ARGS]")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--check", action="store_true", help="validate only")
    parser.add_argument("--nproc", type=int, help="processes (default: the recipe's)")
    parser.add_argument("--name", help="output folder outputs/NAME (default: the recipe's name)")
    options, arguments = parser.parse_known_args()
    rank = os.environ.get("RANK")  # set by torchrun
    try:
        job = prepare(options, arguments, first=rank in (None, "0"))
        if job is None:
            return 0
        if rank is None:
            return start(options, arguments, *job[:2])
        # Locked while this process trains, by the rank that fills the folder.
        lock = open_run(*job[1:]) if rank == "0" else nullcontext()
    except InputError as error:
        if rank in (None, "0"):
            print(f"train.py: {error}", file=sys.stderr, flush=True)
        return 2
    with lock:
        train(complete(*job[:2]))
    return 0


def prepare(options: argparse.Namespace, arguments: list[str], *, first: bool):
    """(config, folder, resolved table) of the run to train; None when checking was all.

    Raises InputError for everything that is wrong.
    """
    config = load_job(options.recipe, arguments)
    wanted = config.nproc
    asked = wanted if options.nproc is None else options.nproc
    world = int(os.environ.get("WORLD_SIZE", asked))
    config.nproc = world  # part of what a run is: another number of ranks is another run
    folder = run_folder(Path(config.dump_folder), options.name or config.recipe)
    table = resolved_table(config)
    if world != wanted:
        try:
            check_layout(config, world)
        except InputError as error:
            raise InputError(f"{error}; this recipe wants {wanted} processes") from None
    check_job(config, world, verify_data=first)
    # Rank 0 alone looks into the folder, since it also fills it while the others start; when it
    # refuses, torchrun ends them. That a run is finished, all ranks see alike.
    finished = (folder / RESULT).exists()
    state = run_state(folder, table) if first or finished else "new"
    if first:
        print(
            f"{options.recipe}: ok, {world} processes, {folder} {describe(state, config, folder)}",
            flush=True,
        )
    return None if options.check or state == "finished" else (config, folder, table)


def describe(state: str, config, folder: Path) -> str:
    """What training does with ``folder``. Raises InputError when no checkpoint there is whole."""
    if state == "finished":
        return "is finished (its result.json stays)"
    wanted = config.checkpoint.enable and config.checkpoint.load_step != -1
    if state == "new" and not wanted:
        return "will be made"
    if not config.checkpoint.enable:
        return "was interrupted and starts again from step 1 (checkpoint.enable is false)"
    found = resume_from(folder / config.checkpoint.folder, config.checkpoint.load_step)
    goes_on = (
        "was interrupted before its first checkpoint and starts again from step 1"
        if found.step is None
        else f"goes on after step {found.step} of {config.training.steps}"
    )
    return "\n".join([goes_on, *(f"note: {note}" for note in found.notes)])


def start(options: argparse.Namespace, arguments: list[str], config, folder: Path) -> int:
    """Ranks on this machine, by the same arguments; the exit code."""
    command = [__file__, str(options.recipe), *arguments]
    if options.name:
        command += ["--name", options.name]
    check_memory(config)
    code = launch(command, folder, nproc=config.nproc, steps=config.training.steps)
    if code == 130:
        print(f"the same command again: {folder} {describe('resume', config, folder)}")
    return code


def check_memory(config) -> None:
    """Raise InputError for a job that would fill the memory of a machine without a GPU."""
    if not device.on_cpu():
        return
    each = max(rank.total for rank in memory_of_ranks(config, config.nproc)) / 2**30
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if config.nproc * each > there:
        raise InputError(
            f"{config.recipe} wants {config.nproc} processes of {each:.1f} GiB each, and this "
            f"machine has {there:.1f} GiB and no GPU; start it on a cluster "
            "(recipes/slurm/README.md), or take a debug recipe"
        )


def train(config) -> None:
    init_logger()
    device.share_cores()
    die_with_parent(signal.SIGTERM)  # or ranks of a killed torchrun would hold the lock
    logger.setLevel(logging.INFO if os.environ["RANK"] == "0" else logging.WARNING)
    trainer = config.build()
    # One rank speaks: the one that has the loss (under pipeline parallelism not rank 0).
    logger.setLevel(logging.INFO if trainer.metrics_processor.writes else logging.WARNING)
    try:
        trainer.train()
        folder = config.dump_folder
        logger.info(f"Result: {folder}/result.json; a page of it: topoep report {folder}")
    finally:
        trainer.close()
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    code = main()
    if "RANK" in os.environ:
        leave(code)
    sys.exit(code)
