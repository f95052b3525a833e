"""Run independent tasks, here or in processes, and show how far they are.

A task calls ``report`` as it goes on; what it did not report of its size counts when it ends.
"""

import ctypes
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from data.errors import DataError

PR_SET_PDEATHSIG = 1  # linux/prctl.h
EVERY = 10.0  # seconds between lines where the output is no terminal
REFRESH = 0.2  # seconds between looks at the counters, and lines on a terminal
BYTES_A_TOKEN = 4.2  # of text; 3.5 to 5 by source and tokenizer

# What this run's tasks have done, [size in the bar's unit, bytes of text]: shared by processes.
_done: Any = [0.0, 0.0]
_reported = [0.0]  # size, by this process
_bar: "Bar | None" = None  # where the tasks run in this process: to be shown from within


def run_tasks(
    label: str,
    unit: str,
    tasks: list[tuple],
    function: Callable,
    sizes: list[float],
    workers: int,
    *,
    budget: float | None = None,
) -> None:
    """``function(*task)`` for each; ``sizes``: what each one weighs, in ``unit``.

    ``budget``: Mtok that their text should bring, shown when the size of a task is unknown (0).
    Processes are spawned, not forked: a forked tokenizer can hang (tokenizers#187). An error ends
    the others that have not begun.
    """
    total = None if budget is not None and 0 in sizes else sum(sizes)
    context = multiprocessing.get_context("spawn")
    bar = Bar(label, unit, total, len(tasks), budget)
    if workers == 1 or len(tasks) < 2:
        _begin([0.0, 0.0], bar)
        for task, size in zip(tasks, sizes):
            _run(function, task, size)
            bar.finish_one()
    else:
        counters = context.Array("d", 2)
        _begin(counters, None)
        pool = ProcessPoolExecutor(min(workers, len(tasks)), context, _worker, (counters,))
        with pool:
            running = {pool.submit(_run, function, *pair) for pair in zip(tasks, sizes)}
            try:
                while running:
                    ended, running = wait(running, REFRESH, FIRST_COMPLETED)
                    for future in ended:
                        future.result()
                        bar.finish_one()
                    bar.show(*_done)
            except BrokenProcessPool:
                raise DataError(
                    f"{label}: a process died (out of memory?); run the same command with fewer "
                    "--workers, it goes on where it stopped"
                ) from None
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    bar.close(*_done)
    _begin([0.0, 0.0], None)


def report(size: float, text: float = 0.0) -> None:
    """A task did ``size`` more, in the unit of its sizes, and read ``text`` more bytes of text."""
    if isinstance(_done, list):
        _done[0], _done[1] = _done[0] + size, _done[1] + text
    else:
        with _done.get_lock():
            _done[0], _done[1] = _done[0] + size, _done[1] + text
    _reported[0] += size
    if _bar is not None:
        _bar.show(*_done)


def _run(function: Callable, task: tuple, size: float) -> None:
    before = _reported[0]
    function(*task)
    report(max(0.0, size - (_reported[0] - before)))


def _begin(counters: Any, bar: "Bar | None") -> None:
    global _done, _bar
    _done, _bar = counters, bar


def _worker(counters: Any) -> None:
    die_with_parent()
    _begin(counters, None)


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Or an orphan would still be writing when a killed run is started again."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)


class Bar:
    """``label: 3/11 tasks, 1.2/4.5 MB, 0.8 MB/s, 0:04 left`` on a terminal, lines elsewhere.

    Without a total: ``label: 3/11 tasks, 1.2 MB, 0.8 MB/s, text for about 0.4/2.0 Mtok``.
    """

    def __init__(
        self, label: str, unit: str, total: float | None, tasks: int, budget: float | None = None
    ):
        self._label, self._unit, self._total, self._tasks = label, unit, total, tasks
        self._budget, self._finished = budget, 0
        self._began = self._shown = time.perf_counter()

    def finish_one(self) -> None:
        self._finished += 1

    def show(self, done: float, text: float) -> None:
        now, terminal = time.perf_counter(), sys.stdout.isatty()
        if now - self._shown > (REFRESH if terminal else EVERY):
            self._shown = now
            line = self.line(done, text, now)
            print(f"\r\033[K{line}" if terminal else line, end="" if terminal else "\n", flush=True)

    def line(self, done: float, text: float, now: float) -> str:
        rate = done / max(now - self._began, 1e-9)
        tasks = f"{self._label}: {self._finished}/{self._tasks} tasks"
        if self._total is None:
            return (
                f"{tasks}, {done:,.1f} {self._unit}, {rate:,.1f} {self._unit}/s, text for about "
                f"{text / BYTES_A_TOKEN / 1e6:,.1f}/{self._budget:,.1f} Mtok"
            )
        done = min(done, self._total)
        left = (self._total - done) / max(rate, 1e-9)
        return (
            f"{tasks}, {done:,.1f}/{self._total:,.1f} {self._unit}, {rate:,.1f} {self._unit}/s, "
            f"{int(left) // 60}:{int(left) % 60:02d} left"
        )

    def close(self, done: float, text: float) -> None:
        if not self._tasks:
            return
        seconds = max(time.perf_counter() - self._began, 1e-9)
        start = "\r\033[K" if sys.stdout.isatty() else ""
        print(
            f"{start}{self._label}: {self._tasks} tasks, {done:,.1f} {self._unit} in "
            f"{seconds:.1f} s, {done / seconds:,.1f} {self._unit}/s",
            flush=True,
        )
