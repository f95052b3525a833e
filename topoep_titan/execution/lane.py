"""A communication lane: work that runs beside the computation, in the order it was submitted.

On CUDA a side stream; on CPU one worker thread, since gloo's collectives and torch's copies release
the interpreter while they work. A lane orders whole multi-hop exchanges, which handles of single
collectives could not. All ranks submit in the same order, and wait for all they submitted before
they leave a layer, so that no other collective of the group can overtake. Names are for profiles.
"""

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function


class Pending:
    """A submitted call; ``result()`` waits for it and returns its value, or raises its error."""

    def __init__(self, wait: Callable[[], Any]):
        self.result = wait


class ThreadLane:
    """Runs calls one after the other on a thread of its own (CPU), which ends with the lane."""

    def __init__(self):
        self.calls: queue.SimpleQueue = queue.SimpleQueue()
        # A daemon: a collective that waits for a dead rank must not keep the process alive.
        threading.Thread(target=_work, args=(self.calls,), name="topoep-lane", daemon=True).start()
        weakref.finalize(self, self.calls.put, None)

    def submit(self, name: str, call: Callable, *arguments: Any) -> Pending:
        done, outcome = threading.Event(), []
        self.calls.put((name, call, arguments, done, outcome))

        def result() -> Any:
            done.wait()
            value, error = outcome
            if error is not None:
                raise error
            return value

        return Pending(result)


class StreamLane:
    """Issues calls at once on a side stream (CUDA); events order the two streams."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)

    def submit(self, name: str, call: Callable, *arguments: Any) -> Pending:
        self.stream.wait_stream(torch.cuda.current_stream())
        _record(arguments, self.stream)
        with torch.cuda.stream(self.stream), torch.no_grad(), record_function(name):
            value = call(*arguments)
        finished = self.stream.record_event()

        def result() -> Any:
            current = torch.cuda.current_stream()
            current.wait_event(finished)
            _record(value, current)
            return value

        return Pending(result)


def make_lane(device: torch.device) -> ThreadLane | StreamLane:
    return StreamLane(device) if device.type == "cuda" else ThreadLane()


def _work(calls: queue.SimpleQueue) -> None:
    torch.set_grad_enabled(False)  # per thread; gradients are written by hand
    while (item := calls.get()) is not None:
        name, call, arguments, done, outcome = item
        with record_function(name):
            try:
                outcome[:] = call(*arguments), None
            except BaseException as error:
                outcome[:] = None, error
        done.set()
        del item, call, arguments, outcome  # or their tensors would live until the next call


def _record(values: Any, stream: "torch.cuda.Stream") -> None:
    """Tell the allocator that every tensor in nested sequences is also used on ``stream``."""
    if isinstance(values, Tensor):
        if values.is_cuda:
            values.record_stream(stream)
    elif isinstance(values, (tuple, list)):
        for value in values:
            _record(value, stream)
