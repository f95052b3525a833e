"""Train one recipe:  torchrun --nproc-per-node N train.py RECIPE [--name X] [--section.key value]

With --check it validates recipe, layout, data and output folder in one process and exits with 2
and one message when something is wrong. `make train` runs that first.
"""

import argparse
import logging
import os
import sys
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
    except InputError as error:
        if first:
            print(f"train.py: {error}", file=sys.stderr)
        return 2
    if options.check or state == "finished":
        if first:
            print(f"{options.recipe}: ok, {world} processes, {folder} {STATES[state]}")
        return 0
    if "RANK" not in os.environ:
        remedy = f"start it with torchrun, or: make train RECIPE={options.recipe}"
        print(f"train.py: {remedy}", file=sys.stderr)
        return 2
    try:
        lock = open_run(folder, table) if first else None  # held while this process lives
    except InputError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    train(complete(config, folder))
    del lock
    return 0


def train(config) -> None:
    init_logger()
    device.share_cores()
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
