"""Expert copies without the peer's help: kernels read mains and write regions of other ranks.

Letters: R ranks, e = E/R mains a rank, S replica slots a rank, P parts of an expert (w1, w2, w3).

``symm_mem`` moves copies within a node over peer-mapped memory (``peer_memory.py``) and those
between nodes as ``collective`` does. ``gin`` leaves the latter to the network card (``gin.py``).
Tokens and counts travel as in ``CollectiveTransport``. On the CPU ``symm_mem`` works on shared
memory, and the same kernels run in the SIMT machine of the compiled CPU library.
"""

import math
from collections.abc import Callable, Sequence

import torch
from topoep_kernels import transfers
from topoep_kernels.library import find
from torch import Tensor

from topoep_titan.errors import InputError
from topoep_titan.execution.buffers import empty_each
from topoep_titan.execution.peer_memory import open_memory
from topoep_titan.execution.replicas import Copies
from topoep_titan.execution.transport import CollectiveTransport, ProcessGroup, wait_all

ONE_SIDED = ("symm_mem", "gin")
ALIGNMENT = 16  # bytes: what the kernels move at least


def missing_for(transport: str) -> str | None:
    """What this machine lacks for ``transport`` ("symm_mem" or "gin"), or None."""
    on_gpu = torch.cuda.is_available()
    if transport == "gin":
        return "a CUDA device" if not on_gpu else "a host side that drives the library: not written"
    library = "libtopoep_cuda.so" if on_gpu else "libtopoep_cpu.so"
    if find(library) is None:
        return f"{library}, which is not built: `pip install -e .`" + (" where nvcc is" * on_gpu)
    return None


class OneSidedTransport(CollectiveTransport):
    """Tokens by collectives; expert copies by kernels where the peer's memory is mapped here."""

    one_sided = True

    def allocate(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """One allocation that peers reach, cut without gaps: offsets are the same on all ranks."""
        for shape in shapes:
            nbytes = math.prod(shape[-2:]) * dtype.itemsize
            if nbytes % ALIGNMENT:
                raise InputError(
                    f"topoep.transport moves experts in multiples of {ALIGNMENT} bytes; a matrix "
                    f'of {shape[-2]} x {shape[-1]} {dtype} has {nbytes}: use "collective"'
                )
        sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
        if not any(sizes):  # no replica slots: nothing is copied
            return empty_each(shapes, dtype, device)
        self.peers = open_memory(sum(sizes), self.group, self.ranks_per_node, device)
        self.tables: dict[int, tuple[Tensor, Tensor]] = {}
        pieces = self.peers.memory.split(sizes)
        return [piece.view(dtype).view(shape) for piece, shape in zip(pieces, shapes)]

    def pull(self, copies: Copies, mains: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
        self._move("parameter", transfers.pull_replicas, copies, mains, slots)

    def push(self, copies: Copies, grads: Sequence[Tensor], regions: Sequence[Tensor]) -> None:
        self._move("gradient", transfers.push_gradients, copies, regions, grads)

    def _move(
        self,
        kind: str,
        kernel: Callable,
        copies: Copies,
        theirs: Sequence[Tensor],
        ours: Sequence[Tensor],
    ) -> None:
        """``theirs``: what the kernel addresses on other ranks (mains, or regions); ``ours``: the
        slots that it fills, or the gradients that it takes. Both come from ``allocate``."""
        self.peers.fence()  # mains are written; regions of the layer before are read
        far = copies.among(lambda peer: not self.peers.base_R[peer])
        near = copies.among(lambda peer: bool(self.peers.base_R[peer]))
        pulls = kind == "parameter"
        pending = self.post_pull(far, theirs, ours) if pulls else self.post_push(far, ours, theirs)
        (theirs_PR, _), (_, ours_P) = self._table(theirs), self._table(ours)
        part_bytes = ours[0][0].nbytes
        kernel(copies.expert_G, copies.place_E, theirs_PR, ours_P, part_bytes, self.rank)
        for copy in near.outgoing if pulls else near.incoming:
            for _ in ours:
                self.traffic.count_one(kind, copy.peer, part_bytes)
        wait_all(pending)
        self.peers.fence()  # mains are read; gradients have arrived

    def _table(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Addresses of the parts on all ranks (P, R), 0 where not mapped, and here (P,)."""
        key = tensors[0].data_ptr()
        if key not in self.tables:
            start = self.peers.memory.data_ptr()
            own = [tensor.data_ptr() for tensor in tensors]
            everywhere = [
                [base and base + address - start for base in self.peers.base_R] for address in own
            ]
            device = tensors[0].device
            self.tables[key] = (
                transfers.addresses(everywhere, device),
                transfers.addresses(own, device),
            )
        return self.tables[key]


def make_transport(name: str, group: ProcessGroup, ranks_per_node: int) -> CollectiveTransport:
    """The transport that a recipe names; "auto" is "collective"."""
    kind = OneSidedTransport if name in ONE_SIDED else CollectiveTransport
    return kind(group, ranks_per_node)
