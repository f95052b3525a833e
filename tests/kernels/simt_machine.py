"""The GPU kernels of the CPU library, run thread by thread: schedules, counters and errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_char_p, c_int, c_int64, c_longlong

import torch
from topoep_kernels.library import cpu_library

SCHEDULES = ("forward", "reverse", "random")


class SimtError(RuntimeError):
    """The SIMT machine found a mistake in a kernel."""


def check(code: int) -> None:
    if code:
        message = cpu_library().topoep_device_error
        message.restype = c_char_p
        raise SimtError(message(c_int(code)).decode())


@contextmanager
def schedule(name: str, seed: int = 0) -> Iterator[None]:
    """Kernels launched by this thread run their fibers in this order."""
    cpu_library().topoep_simt_schedule(c_int(SCHEDULES.index(name)), c_int64(seed))
    try:
        yield
    finally:
        cpu_library().topoep_simt_schedule(c_int(0), c_int64(0))


def counters() -> dict[str, int]:
    """Of the last launch; `longest`: the longest chain of barriers and collectives in a block."""
    values = (c_longlong * 4)()
    cpu_library().topoep_simt_counters(values)
    return dict(zip(("barriers", "collectives", "longest", "bulk_copies"), values))


def chains() -> list[int]:
    """The longest chain of each launch since the schedule was set, of the first 32."""
    values = (c_longlong * 32)()
    return values[: cpu_library().topoep_simt_chains(values)]


def selftest(case: int, in_N: torch.Tensor) -> torch.Tensor:
    """Runs a case of csrc/device/simt_selftest.cu on one block of len(in_N) threads."""
    threads = in_N.numel()
    aligned = torch.zeros(threads + 4, dtype=torch.int32)  # torch aligns to 64 bytes
    aligned[:threads] = in_N
    out = torch.full((4, threads), -7, dtype=torch.int32)
    run = cpu_library().topoep_simt_selftest
    run.argtypes = [c_int64, c_int64, c_int, c_int]
    check(run(out.data_ptr(), aligned.data_ptr(), case, threads))
    return out.flatten()
