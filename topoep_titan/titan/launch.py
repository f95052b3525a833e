"""Start a job's ranks on this machine: one progress line here, their own words in ``train.log``."""

import functools
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

from data.tasks import die_with_parent
from topoep_titan.errors import InputError
from topoep_titan.titan.device import on_cpu
from topoep_titan.titan.run_folder import LOG
from topoep_titan.titan.step_log import StepLog

EVERY = 10.0  # seconds between progress lines where the output is no terminal
TOLD = 5  # lines of a failure
ERROR = re.compile(r"(\[rank\d+\]: *)?[\w.]+(Error|Exception)\b")  # the end of a traceback


def launch(command: list[str], folder: Path, *, nproc: int, steps: int) -> int:
    """Run ``command`` (a program and its arguments) on ``nproc`` ranks until it has made ``steps``.

    The exit code: 0; 2 when a rank refuses its input; 130 when interrupted; 1 for all else.
    Raises InputError when the machine has fewer devices than ranks, or ``folder`` cannot be made.
    """
    if not on_cpu() and nproc > torch.accelerator.device_count():
        raise InputError(
            f"{nproc} processes need as many devices, and this machine has "
            f"{torch.accelerator.device_count()}; give --nproc, or start torchrun on every machine "
            "(recipes/slurm/README.md)"
        )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", str(nproc), *command]
    log = folder / LOG
    try:
        folder.mkdir(parents=True, exist_ok=True)
        log.touch()
    except OSError as error:
        raise InputError(f"{log} cannot be written ({error.strerror})") from None
    began = log.stat().st_size
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with log.open("ab") as file:
        process = subprocess.Popen(
            torchrun,
            stdout=file,
            stderr=file,
            start_new_session=True,  # Ctrl-C is for this process, which then ends the ranks
            preexec_fn=functools.partial(die_with_parent, signal.SIGTERM),
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
    progress = Progress(folder, steps)
    try:
        progress.follow(process)
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):  # ending the ranks takes a moment
            signal.signal(number, signal.SIG_IGN)
        when = f"after step {progress.step}" if progress.step else "while starting"
        print(f"\n{folder.name}: interrupted {when}", flush=True)
        return 130
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    if not process.returncode:
        print(f"Result: {folder}/result.json; a page of it: topoep report {folder}")
        return 0
    told = _reasons(log.read_bytes()[began:].decode(errors="replace").splitlines())
    print(f"{folder.name} failed; from {log}:", *told, sep="\n", file=sys.stderr)
    return 2 if told[0].startswith("train.py: ") else 1


def leave(code: int) -> NoReturn:
    """End a rank whose work is done and whose files are closed, without closing its interpreter.

    gloo's threads outlive ``destroy_process_group`` while a mesh still names their group, and drop
    the tensors of the last collective only after they have woken the rank. One that does so while
    the interpreter closes is unwound out of a C++ destructor, which aborts the process (torch
    2.14.1 on CPython 3.11, seen in 1 run of about 20 on busy cores).
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Progress:
    """One line, rewritten as steps arrive; where the output is no terminal, one in ten seconds."""

    def __init__(self, folder: Path, steps: int):
        self.name, self.steps, self.step = folder.name, steps, 0
        self._log = StepLog(folder)
        self._read = self._log.size()  # of an earlier start
        self._validation, self._notes = "", []

    def follow(self, process: subprocess.Popen) -> None:
        """Until the process ends."""
        started, shown, first = time.monotonic(), 0.0, None
        print(f"{self.name}: starting", end="", flush=True)
        running = True
        while running:
            time.sleep(0.5)
            running = process.poll() is None
            now, record = time.monotonic(), self._newest()
            for note in self._notes:
                print(f"\n{note}", end="\n" * sys.stdout.isatty(), flush=True)
            self._notes = []
            if record is None:
                continue
            first = first or (self.step, now)
            made = self.step - first[0]
            pace = (now - first[1]) / made if made else None
            if sys.stdout.isatty():
                print(f"\r\033[K{self.line(record, pace)}", end="", flush=True)
            elif now - shown > EVERY or self.step == self.steps:
                shown = now
                print(f"\n{self.line(record, pace)}", end="", flush=True)
        print(f"\n{self.name}: {time.monotonic() - started:.0f} s", flush=True)

    def _newest(self) -> dict[str, Any] | None:
        """The last training record since the last call."""
        self._read = min(self._read, self._log.size())  # a run that resumes cuts its log
        records, self._read = self._log.after(self._read)
        training = [record for record in records if "loss" in record]
        for record in records:
            if "validation_loss" in record:
                self._validation = f" (validation {record['validation_loss']:.4f})"
            if "note" in record:
                self._notes.append(f"{self.name}: after step {record['step']}, {record['note']}")
        if not training:
            return None
        self.step = training[-1]["step"]
        return training[-1]

    def line(self, record: dict[str, Any], pace: float | None) -> str:
        """``pace``: seconds a step, once known."""
        step = record["step"]
        left = "" if pace is None else f"  {pace * (self.steps - step):.0f} s left"
        return (
            f"{self.name}: step {step}/{self.steps}  "
            f"loss {record['loss']:.4f}{self._validation}  "
            f"max/mean {record['max_over_mean_before']:.2f} -> {record['max_over_mean']:.2f}  "
            f"{record['tokens_per_second']:,.0f} tokens/s{left}"
        )


def _reasons(lines: list[str]) -> list[str]:
    """What the ranks said last: their refusals, else their errors, else the end."""
    launcher = next((i for i, line in enumerate(lines) if "ChildFailedError" in line), None)
    said = lines[:launcher]
    refused = [line for line in said if line.startswith("train.py: ")]
    errors = [line for line in said if ERROR.match(line)]
    killed = [line.strip() for line in lines if "received by PID" in line and "TERM" not in line]
    return refused or errors[-TOLD:] + killed[:1] or lines[-30:] or ["(it said nothing)"]
