"""Memory that ranks of one node read and write without asking each other, and a fence over it.

Letters: R ranks of the expert-parallel group.

``open_memory`` makes one allocation a rank and maps those of the node's other ranks into this
process: on CUDA with torch's symmetric memory (peer-mapped over NVLink), on the CPU with files in
/dev/shm. Kernels address a peer's byte i as ``base_R[peer] + i``. ``open_window`` does it through
NCCL, and reaches the ranks of other nodes by the network card. Either happens once, for all layers;
the memory lives as long as the process. What needs a GPU was not yet run on one.
"""

import errno
import mmap
import os
import secrets
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from topoep_kernels.gin import Network
from torch import Tensor

from topoep_titan.errors import InputError

SHARED = Path("/dev/shm")


class PeerMemory(Protocol):
    memory: Tensor  # uint8 (n,): this rank's
    base_R: list[int]  # address of each rank's memory here; 0 where it is not mapped
    network: Network | None  # reaches the ranks that are not mapped

    def fence(self) -> None:
        """Collective over the node (with a network, over all ranks): what they wrote before is
        seen by all that pass.

        On CUDA in the order of the current stream; the host does not wait."""
        ...


def open_memory(
    nbytes: int, group: dist.ProcessGroup, ranks_per_node: int, device: torch.device
) -> PeerMemory:
    """Collective over ``group``, whose nodes are ``ranks_per_node`` consecutive ranks each.

    Raises InputError when a rank of the node cannot be reached, or the memory is too small.
    """
    node, first = _node_group(group, ranks_per_node, device)
    kind = _SymmetricMemory if device.type == "cuda" else _SharedFiles
    opened = kind(nbytes, node, device)
    ranks_after = dist.get_world_size(group) - first - len(opened.base_R)
    opened.base_R = [0] * first + opened.base_R + [0] * ranks_after
    return opened


def open_window(nbytes: int, group: dist.ProcessGroup, device: torch.device) -> PeerMemory:
    """Collective over ``group``: memory registered with its NCCL communicator.

    Raises InputError when NCCL cannot drive the network from the GPU here.
    """
    backend = group._get_backend(device)
    communicator = backend._comm_ptr()
    if not communicator:  # NCCL makes it with the first collective
        raise RuntimeError("the group's NCCL communicator is not there yet")
    with torch.cuda.use_mem_pool(torch.cuda.MemPool(backend.mem_allocator)):
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    try:
        return _Window(memory, Network(communicator, memory, group.rank(), group.size()))
    except RuntimeError as error:
        raise InputError(
            'topoep.transport = "gin" needs a network card that NCCL drives from the GPU (GIN): '
            f'{error}; use "symm_mem" or "collective"'
        ) from error


class _Window:
    def __init__(self, memory: Tensor, network: Network):
        self.memory, self.network = memory, network
        self.base_R, self.fence = network.base_R, network.fence


class _SharedFiles:
    """One file a rank, mapped by all; without a name as soon as everyone has mapped it."""

    network = None

    def __init__(self, nbytes: int, node: dist.ProcessGroup, device: torch.device):
        self.node = node
        path = SHARED / f"topoep-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            mine = _map_new(path, nbytes)
            paths: list[str] = [""] * dist.get_world_size(node)
            dist.all_gather_object(paths, str(path), group=node)
            maps = [mine if p == str(path) else _map_existing(Path(p)) for p in paths]
            dist.barrier(node)
        finally:
            path.unlink(missing_ok=True)
        views = [torch.frombuffer(m, dtype=torch.uint8) for m in maps]
        self.memory = views[dist.get_rank(node)]
        self.base_R = [view.data_ptr() for view in views]
        self.views = views  # keep the mappings

    def fence(self) -> None:
        dist.barrier(self.node)


def _map_new(path: Path, nbytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Reserve the pages now: a full file system would otherwise end in a bus error later.
        os.posix_fallocate(descriptor, 0, nbytes)
        return mmap.mmap(descriptor, nbytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
        raise InputError(
            f"topoep.transport: {SHARED} has {free:,} bytes free, of {nbytes:,} that each rank "
            'shares; enlarge it (containers: --shm-size), or use "collective"'
        ) from None
    finally:
        os.close(descriptor)


def _map_existing(path: Path) -> mmap.mmap:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        raise InputError(
            f"topoep.transport: a rank of this node shares no {SHARED} with this one; set "
            'topoep.ranks_per_node to the ranks of one machine, or use "collective"'
        ) from None
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


class _SymmetricMemory:
    """torch's symmetric memory: mapped once, its barrier on the current stream."""

    network = None

    def __init__(self, nbytes: int, node: dist.ProcessGroup, device: torch.device):
        import torch.distributed._symmetric_memory as symmetric

        self.node = node
        try:
            self.memory = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
            self.handle = symmetric.rendezvous(self.memory, node)
        except RuntimeError as error:
            raise InputError(
                "topoep.transport: the GPUs of this node cannot map each other's memory "
                f'({error}); check topoep.ranks_per_node, or use "collective"'
            ) from error
        # Where in torch's block the allocation begins: all ranks have allocated alike.
        inside = self.memory.data_ptr() - self.handle.buffer_ptrs[self.handle.rank]
        self.base_R = [address + inside for address in self.handle.buffer_ptrs]
        # Waits for a slow rank, but not for ever for a dead one.
        self.timeout_ms = _timeout(node, device) // timedelta(milliseconds=1)

    def fence(self) -> None:
        self.handle.barrier(channel=0, timeout_ms=self.timeout_ms)


def _node_group(
    group: dist.ProcessGroup, ranks_per_node: int, device: torch.device
) -> tuple[dist.ProcessGroup, int]:
    """(group of this rank's node, its first rank in ``group``).

    A group of its own where there are several nodes: gloo, which costs no device memory and need
    not be made by ranks outside it; on CUDA it serves the rendezvous alone.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if ranks <= ranks_per_node:
        return group, 0
    first = rank // ranks_per_node * ranks_per_node
    members = dist.get_process_group_ranks(group)[first : first + ranks_per_node]
    node = dist.new_group(
        members,
        backend="gloo",
        timeout=_timeout(group, device),
        use_local_synchronization=True,
    )
    return node, first


def _timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    return group._get_backend(device).options._timeout
