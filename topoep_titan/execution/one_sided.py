"""Expert copies without the peer's help: kernels read mains and write regions of other ranks.

Letters: R ranks, e = E/R mains a rank, S replica slots a rank, P parts of an expert (w1, w2, w3).

``symm_mem`` moves copies within a node over peer-mapped memory (``peer_memory.py``) and those
between nodes as ``collective`` does. ``gin`` leaves the latter to the network card, whose owner of
the bytes puts them and signals. Tokens and counts travel as in ``CollectiveTransport``. On the CPU
``symm_mem`` works on shared memory, and the same kernels run in the SIMT machine of the compiled
CPU library. On a GPU neither was run yet; a run's first copies are compared with collective ones.
"""

import math
from collections.abc import Callable, Sequence

import torch
from topoep_kernels import gin, transfers
from topoep_kernels.library import find
from torch import Tensor

from topoep_titan.errors import InputError
from topoep_titan.execution.buffers import empty_each
from topoep_titan.execution.peer_memory import open_memory, open_window
from topoep_titan.execution.replicas import Copies
from topoep_titan.execution.transport import CollectiveTransport, Kind, ProcessGroup, wait_all

ONE_SIDED = ("symm_mem", "gin")
ALIGNMENT = 16  # bytes: what the kernels move at least


def missing_for(transport: str) -> str | None:
    """What this machine lacks for ``transport`` ("symm_mem" or "gin"), or None."""
    on_gpu = torch.cuda.is_available()
    if transport == "gin":
        return gin.missing() if on_gpu else "a CUDA device"
    library = "libtopoep_cuda.so" if on_gpu else "libtopoep_cpu.so"
    if find(library) is None:
        return f"{library}, which is not built: `pip install -e .`" + (" where nvcc is" * on_gpu)
    return None


class TransportError(RuntimeError):
    """Copies that peers made through mapped memory are not the bytes that they sent."""


class OneSidedTransport(CollectiveTransport):
    """Tokens by collectives; expert copies by kernels where the peer's memory is mapped here."""

    one_sided = True

    def __init__(self, group: ProcessGroup, ranks_per_node: int, *, network: bool):
        super().__init__(group, ranks_per_node)
        self.network = network  # copies to other nodes by the network card
        self.unverified = {"parameter", "gradient"}

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
        if self.network:
            self.peers = open_window(sum(sizes), self.group, device)
        else:
            self.peers = open_memory(sum(sizes), self.group, self.ranks_per_node, device)
        self.tables: dict[int, tuple[Tensor, Tensor]] = {}
        pieces = self.peers.memory.split(sizes)
        return [piece.view(dtype).view(shape) for piece, shape in zip(pieces, shapes)]

    def pull(self, copies: Copies, mains: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
        self.peers.fence()  # mains are written, slots are free
        pending = self._start("parameter", copies, mains, slots)
        self._run(transfers.pull_replicas, copies, mains, slots)
        wait_all(pending)
        self._verify("parameter", copies, mains, slots)
        self.peers.fence()  # mains are read

    def push(self, copies: Copies, grads: Sequence[Tensor], regions: Sequence[Tensor]) -> None:
        self.peers.fence()  # regions of the layer before are read
        pending = self._start("gradient", copies, grads, regions)
        self._run(transfers.push_gradients, copies, regions, grads)
        wait_all(pending)
        self.peers.fence()  # gradients have arrived
        self._verify("gradient", copies, grads[:1], regions[:1])  # one part: regions are large

    def _start(
        self, kind: Kind, copies: Copies, source: Sequence[Tensor], target: Sequence[Tensor]
    ) -> list:
        """Counts all copies, and sends those between nodes on their way; what to wait for."""
        far = copies.among(lambda peer: not self.peers.base_R[peer])
        near = copies.among(lambda peer: bool(self.peers.base_R[peer]))
        network, pulls = self.peers.network, kind == "parameter"
        for part in (near,) if network is None else (near, far):  # the posts below count
            for copy in part.outgoing if pulls else part.incoming:
                for tensor in source:
                    self.traffic.count_one(kind, copy.peer, tensor[0].nbytes)
        if network is None:
            return (self.post_pull if pulls else self.post_push)(far, source, target)
        return [network.put(copies.expert_G, copies.place_E, source, target, gradients=not pulls)]

    def _run(
        self, kernel: Callable, copies: Copies, theirs: Sequence[Tensor], ours: Sequence[Tensor]
    ) -> None:
        """The kernel for copies within the node, between others' mains or regions and our slots."""
        everywhere_PR, here_P = self._table(theirs)[0], self._table(ours)[1]
        part_bytes = ours[0][0].nbytes
        kernel(copies.expert_G, copies.place_E, everywhere_PR, here_P, part_bytes, self.rank)

    def _verify(
        self, kind: Kind, copies: Copies, source: Sequence[Tensor], target: Sequence[Tensor]
    ) -> None:
        """The first pull and push of a run are made by collectives too, and must agree bit for bit.

        Raises TransportError: peers' memory, addresses or fences are not what they should be."""
        if kind not in self.unverified:
            return
        self.unverified.remove(kind)
        expected = [torch.empty_like(tensor) for tensor in target]
        plain, pulls = CollectiveTransport(self.group, self.ranks_per_node), kind == "parameter"
        (plain.pull if pulls else plain.push)(copies, source, expected)
        for copy in copies.incoming if pulls else copies.outgoing:
            at = copy.slot if pulls else (copy.peer, copy.main)
            for ours, theirs in zip(target, expected):
                if not torch.equal(ours[at].view(torch.uint8), theirs[at].view(torch.uint8)):
                    raise TransportError(
                        f"the first {kind} copies of a run did not arrive as sent: rank "
                        f"{self.rank}, peer {copy.peer}, main {copy.main}, slot {copy.slot}; "
                        'use topoep.transport = "collective", and report this machine'
                    )

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
    if name not in ONE_SIDED:
        return CollectiveTransport(group, ranks_per_node)
    return OneSidedTransport(group, ranks_per_node, network=name == "gin")
