"""Train one recipe:  torchrun --nproc-per-node N train.py RECIPE [--name X] [--section.key value]

With --check it validates recipe, layout, data and output folder in one process and exits with 2
and one message when something is wrong. `make train` runs that first.
"""

import argparse
import logging
import os
import sys
from contextlib import nullcontext
from pathlib import Path

from topoep_titan.titan import device

device.install()  # before anything else of torchtitan is imported

import torch.distributed as dist
from torchtitan.tools.logging import init_logger, logger

from topoep_titan.errors import InputError
from topoep_titan.titan.checks import check_job
from topoep_titan.titan.job import complete, load_job, resolved_table
from topoep_titan.titan.run_folder import RESULT, open_run, run_folder, run_state

STATES = {
    "new": "will be made",
    "resume": "will go on",
    "finished": "is finished (its result.json stays)",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, usage="train.py RECIPE [options] [ARGS]")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--check", action="store_true", help="validate only")
    parser.add_argument("--nproc", type=int, help="processes to check the layout for")
    parser.add_argument("--name", help="output folder outputs/NAME (default: the recipe's name)")
    options, arguments = parser.parse_known_args()
    first = os.environ.get("RANK", "0") == "0"
    try:
        job = prepare(options, arguments, first)
        # Locked while this process trains, by the rank that fills the folder.
        lock = open_run(*job[1:]) if job and first else nullcontext()
    except InputError as error:
        if first:
            print(f"train.py: {error}", file=sys.stderr)
        return 2
    if job:
        config, folder, _ = job
        with lock:
            train(complete(config, folder))
    return 0


def prepare(options: argparse.Namespace, arguments: list[str], first: bool):
    """(config, folder, resolved table) of the run to train; None when checking was all.

    Raises InputError for everything that is wrong.
    """
    config = load_job(options.recipe, arguments)
    world = int(os.environ.get("WORLD_SIZE", 0)) or options.nproc or config.nproc
    config.nproc = world  # part of what a run is: another number of ranks is another run
    folder = run_folder(Path(config.dump_folder), options.name or config.recipe)
    table = resolved_table(config)
    check_job(config, world, verify_data=first)
    # Rank 0 alone looks into the folder, since it also fills it while the others start; when it
    # refuses, torchrun ends them. That a run is finished, all ranks see alike.
    finished = (folder / RESULT).exists()
    state = run_state(folder, table) if first or finished else "new"
    if options.check or state == "finished":
        if first:
            print(f"{options.recipe}: ok, {world} processes, {folder} {STATES[state]}")
        return None
    if "RANK" not in os.environ:
        raise InputError(f"start it with torchrun, or: make train RECIPE={options.recipe}")
    return config, folder, table


def train(config) -> None:
    init_logger()
    device.share_cores()
    device.die_with_launcher()
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
    sys.exit(main())
