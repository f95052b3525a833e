"""A list of tasks on streams -> when each starts and ends on every rank.

A stream runs its tasks in the order of the list, one at a time. A task starts on a rank when its
stream is free there and what it comes after has ended there; a collective task also waits for all
other ranks. That is all a CUDA stream with events does, so the times are those of the schedule.

Letters: R ranks.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Task:
    name: str
    stream: str
    seconds_R: np.ndarray  # float64 (R,)
    after: tuple[str, ...] = ()  # names of earlier tasks of the list
    collective: bool = False


@dataclass(frozen=True)
class Span:
    """float64 (R,), seconds from the start of the list."""

    start_R: np.ndarray
    end_R: np.ndarray


def run(tasks: list[Task]) -> dict[str, Span]:
    """Name -> span. Raises KeyError for a task that comes after one that is not before it."""
    spans: dict[str, Span] = {}
    free_R: dict[str, np.ndarray | float] = {}  # of each stream
    for task in tasks:
        start_R = free_R.get(task.stream, 0.0)
        for name in task.after:
            start_R = np.maximum(start_R, spans[name].end_R)
        if task.collective:
            start_R = np.max(start_R)
        end_R = start_R + task.seconds_R
        spans[task.name] = Span(np.broadcast_to(start_R, end_R.shape), end_R)
        free_R[task.stream] = end_R
    return spans


def finish(spans: dict[str, Span]) -> float:
    """Seconds until the last task has ended on the last rank; 0 for none."""
    return max((float(span.end_R.max()) for span in spans.values()), default=0.0)
