"""Ranks for tests: processes that run functions by name, in one gloo group or one of their own."""

import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import wait
from typing import Any


class RankPool:
    """``pool.run(fn, *args)`` calls ``fn(rank, ranks, *args)`` on every rank; results by rank.

    ``fn`` must be importable (a module-level function). Processes are forked from a server that has
    imported torch and torchtitan once. They share a gloo group and stay for the next call; with
    ``fresh=True`` every call has new ones, and the functions make their own process groups.
    """

    def __init__(self, ranks: int, *, fresh: bool = False):
        self.ranks, self.fresh = ranks, fresh
        self.pipes, self.processes = [], []

    def start(self) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["tests.preload"])
        port = None if self.fresh else free_port()
        for rank in range(self.ranks):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, self.ranks, port)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that a dead rank closes the pipe
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, fn: Callable, *args: Any, timeout: float = 120) -> list[Any]:
        if not self.pipes:
            self.start()
        for pipe in self.pipes:
            pipe.send((fn, args))
        results, waiting = [None] * len(self.pipes), dict(zip(self.pipes, range(len(self.pipes))))
        while waiting:
            ready = wait(list(waiting), timeout)
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {list(waiting.values())} hang in {fn.__name__}")
            for pipe in ready:
                rank = waiting.pop(pipe)
                ok, results[rank] = pipe.recv()
                if not ok:  # the others may wait for this rank for ever: start anew next time
                    self.close()
                    raise AssertionError(f"{fn.__name__} failed on rank {rank}:\n{results[rank]}")
        if self.fresh:
            self.close()
        return results

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
        self.pipes, self.processes = [], []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(pipe, rank: int, ranks: int, port: int | None) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if port is not None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, fn(rank, ranks, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
