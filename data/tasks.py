"""Run independent tasks, here or in processes, and show how far they are."""

import ctypes
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from data.errors import DataError

PR_SET_PDEATHSIG = 1  # linux/prctl.h
EVERY = 10.0  # seconds between lines where the output is no terminal


def run_tasks(
    label: str, unit: str, tasks: list[tuple], function: Callable, sizes: list[float], workers: int
) -> None:
    """``function(*task)`` for each; ``sizes``: what each one weighs, in ``unit``.

    Processes are spawned, not forked: a forked tokenizer can hang (tokenizers#187). An error ends
    the others that have not begun.
    """
    bar = Bar(label, unit, sum(sizes), len(tasks))
    if workers == 1 or len(tasks) < 2:
        for task, size in zip(tasks, sizes):
            function(*task)
            bar.add(size)
    else:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(min(workers, len(tasks)), context, _die_with_parent)
        with pool:
            running = {pool.submit(function, *task): size for task, size in zip(tasks, sizes)}
            try:
                for future in as_completed(running):
                    future.result()
                    bar.add(running[future])
            except BrokenProcessPool:
                raise DataError(
                    f"{label}: a process died (out of memory?); run the same command with fewer "
                    "--workers, it goes on where it stopped"
                ) from None
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    bar.close()


def _die_with_parent() -> None:
    """Or an orphan would still be writing when a killed run is started again."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Bar:
    """``label: 3/11 tasks, 1.2/4.5 MB, 0.8 MB/s, 0:04 left`` on a terminal, lines elsewhere."""

    def __init__(self, label: str, unit: str, total: float, tasks: int):
        self._label, self._unit, self._total, self._tasks = label, unit, total, tasks
        self._done, self._finished = 0.0, 0
        self._began = self._shown = time.perf_counter()

    def add(self, size: float) -> None:
        self._done += size
        self._finished += 1
        now = time.perf_counter()
        if sys.stdout.isatty():
            print(f"\r\033[K{self.line(now)}", end="", flush=True)
        elif now - self._shown > EVERY:
            self._shown = now
            print(self.line(now), flush=True)

    def line(self, now: float) -> str:
        rate = self._done / max(now - self._began, 1e-9)
        left = (self._total - self._done) / max(rate, 1e-9)
        return (
            f"{self._label}: {self._finished}/{self._tasks} tasks, {self._done:,.1f}/"
            f"{self._total:,.1f} {self._unit}, {rate:,.1f} {self._unit}/s, "
            f"{int(left) // 60}:{int(left) % 60:02d} left"
        )

    def close(self) -> None:
        if not self._tasks:
            return
        seconds = max(time.perf_counter() - self._began, 1e-9)
        start = "\r\033[K" if sys.stdout.isatty() else ""
        print(
            f"{start}{self._label}: {self._tasks} tasks, {self._done:,.1f} {self._unit} in "
            f"{seconds:.1f} s, {self._done / seconds:,.1f} {self._unit}/s",
            flush=True,
        )
