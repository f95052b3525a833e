"""Replica transfers between NVLink domains by the network card; compiled, never run.

Letters: R ranks, E experts, e = E/R mains a rank, S replica slots a rank, G = R*(e+S) slots. The
library uses the device API of NCCL (GIN) and is tied to the version that torch loads; the order of
calls is in csrc/gin/gin.cu.
"""

import ctypes
from collections.abc import Sequence
from ctypes import CDLL, RTLD_GLOBAL, c_int, c_longlong, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from topoep_kernels.library import BUILD_COMMAND, find

PARTS = 3  # w1, w2, w3: kParts of csrc/gin/jobs.h


def missing() -> str | None:
    """What the library lacks on this machine, or None. Does not ask for a network card."""
    if find("libtopoep_gin.so") is None:
        return "libtopoep_gin.so, which is built where nvcc and NCCL's headers are"
    built, loaded = gin_library().topoep_gin_nccl_version(), _nccl_version()
    if built != loaded:  # the device structures of NCCL below 2.31 fit one version alone
        return (
            f"libtopoep_gin.so for the NCCL that torch loads ({loaded}), not for {built}: "
            f"{BUILD_COMMAND}"
        )
    return None


@cache
def gin_library() -> CDLL:
    """The library, its NCCL symbols bound to the copy that torch has loaded."""
    _nccl()
    return CDLL(str(find("libtopoep_gin.so")))


class Network:
    """A window over one allocation of every rank, and a device communicator; for the whole run."""

    def __init__(self, communicator: int, memory: Tensor, rank: int, ranks: int):
        """Collective. ``communicator``: address of NCCL's. ``memory``: uint8, of NCCL's allocator,
        at least 4096-byte aligned. Raises RuntimeError with NCCL's reason."""
        self.rank, self.ranks, self.start = rank, ranks, memory.data_ptr()
        self.opened = c_void_p()
        base_R = torch.zeros(ranks, dtype=torch.int64, device=memory.device)
        code = gin_library().topoep_gin_open(
            c_void_p(communicator), c_longlong(ranks), c_void_p(self.start),
            c_longlong(memory.nbytes), c_void_p(base_R.data_ptr()), _stream(),
            ctypes.byref(self.opened),
        )  # fmt: skip
        if code:
            reason = _nccl().ncclGetErrorString
            reason.restype = ctypes.c_char_p
            raise RuntimeError(reason(c_int(code)).decode())
        self.base_R = base_R.tolist()  # where each rank's memory is mapped here; 0: other domain

    def fence(self) -> None:
        """Collective, in the order of the current stream."""
        self._check(gin_library().topoep_gin_fence(self.opened, _stream()))

    def put(
        self,
        expert_G: Tensor,
        place_E: Tensor,
        source: Sequence[Tensor],
        target: Sequence[Tensor],
        *,
        gradients: bool,
    ) -> "Puts":
        """To other domains: mains (``source``) into slots, or gradients of slots into regions.

        Buffers of w1, w2, w3 in the registered memory, at the same offsets on all ranks, an expert
        in each [0]. Collective; one may be under way at a time.
        """
        offsets = [
            (c_longlong * PARTS)(*(part.data_ptr() - self.start for part in buffers))
            for buffers in (source, target)
        ]
        puts = Puts(self, expert_G, place_E, gradients)
        part_bytes = source[0][0].nbytes
        self._check(
            gin_library().topoep_gin_put(
                self.opened, *offsets, *puts.plan(), c_longlong(part_bytes),
                c_longlong(gradients), _stream(),
            )
        )  # fmt: skip
        return puts

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"GIN kernels were not launched: CUDA error {code}")


@dataclass(frozen=True)
class Puts:
    """What one plan sends through the network."""

    network: Network
    expert_G: Tensor
    place_E: Tensor
    gradients: bool

    def wait(self) -> None:
        """In the order of the current stream: what this plan brings here has arrived, and what this
        rank sent may be overwritten."""
        network = self.network
        code = gin_library().topoep_gin_wait(
            network.opened, *self.plan(), c_longlong(self.gradients), _stream()
        )
        network._check(code)

    def plan(self) -> list:
        ranks, experts = self.network.ranks, self.place_E.numel()
        mains = experts // ranks
        sizes = (self.network.rank, ranks, mains, self.expert_G.numel() // ranks - mains)
        addresses = (c_void_p(self.expert_G.data_ptr()), c_void_p(self.place_E.data_ptr()))
        return [*addresses, *map(c_longlong, sizes)]


def _stream() -> c_void_p:
    return c_void_p(torch.cuda.current_stream().cuda_stream)


@cache
def _nccl() -> CDLL:
    return CDLL("libnccl.so.2", mode=RTLD_GLOBAL)  # the copy of torch, by its name


def _nccl_version() -> int:
    version = c_int()
    _nccl().ncclGetVersion(ctypes.byref(version))
    return version.value
