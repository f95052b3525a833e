"""Ranks for tests: a pool of processes that share one gloo group and run functions by name."""

import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import wait
from typing import Any


class RankPool:
    """``pool.run(fn, *args)`` calls ``fn(rank, ranks, *args)`` on every rank; results by rank.

    ``fn`` must be importable (a module-level function). The processes start once and stay, since
    importing torch and connecting costs seconds.
    """

    def __init__(self, ranks: int):
        context = get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, ranks, port), daemon=True)
            process.start()
            theirs.close()  # so that a dead rank closes the pipe
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, fn: Callable, *args: Any, timeout: float = 120) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((fn, args))
        results, waiting = [None] * len(self.pipes), dict(zip(self.pipes, range(len(self.pipes))))
        while waiting:
            ready = wait(list(waiting), timeout)
            if not ready:
                raise TimeoutError(f"ranks {list(waiting.values())} hang in {fn.__name__}")
            for pipe in ready:
                rank = waiting.pop(pipe)
                ok, results[rank] = pipe.recv()
                if not ok:  # the others may wait for this rank for ever: the pool is lost
                    self.close()
                    raise AssertionError(f"{fn.__name__} failed on rank {rank}:\n{results[rank]}")
        return results

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()


def _serve(pipe, rank: int, ranks: int, port: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
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
