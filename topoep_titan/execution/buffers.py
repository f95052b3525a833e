"""Memory for balancing: the paper's three buffers plus a staging buffer, once per model.

Letters: R ranks, E experts, e = E/R main experts a rank, S replica slots a rank, |W| bytes of one
expert in the compute dtype.

    mains    e * |W|   main parameters in the compute dtype, where peers can read them
    slots    S * |W|   replica parameters in forward; replica gradients in backward
    regions  E * |W|   replica gradients that arrive, one region of e experts for each host rank
    staging  S * |W|   replica parameters in backward (TopoEP paper, sections 3.2 and 3.3)

All layers share them: a layer keeps nothing of its replicas between forward and backward. A region
that received nothing is neither read nor cleared. ``mains`` exists only where it is needed: when
parameters are kept in another dtype, or when the transport is one-sided and peers read it. The
transport allocates all of it at once: peers may have to reach it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Experts = Sequence[Tensor]  # w1 (X, F, D), w2 (X, D, F), w3 (X, F, D)


def empty_each(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Memory that peers need not reach."""
    return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]


class Buffers:
    """Buffers shaped after one rank's (w1, w2, w3), allocated when built.

    Collective where ``allocate`` (``transport.allocate``) is: same shapes on all ranks."""

    def __init__(
        self,
        weights: Experts,
        *,
        ranks: int,
        replica_slots: int,
        compute_dtype: torch.dtype,
        one_sided: bool,
        allocate: Callable = empty_each,
    ):
        shapes = [tuple(weight.shape[1:]) for weight in weights]
        mains = weights[0].shape[0]
        read_by_peers = one_sided and replica_slots > 0
        separate = read_by_peers or weights[0].dtype != compute_dtype
        leading = (
            (mains if separate else 0,),
            (replica_slots,),
            (replica_slots,),
            (ranks if replica_slots else 0, mains),
        )
        flat = allocate(
            [(*lead, *shape) for lead in leading for shape in shapes],
            compute_dtype,
            weights[0].device,
        )
        every = [tuple(flat[i : i + len(shapes)]) for i in range(0, len(flat), len(shapes))]
        self.mains: Experts | None = every[0] if separate else None
        self.slots, self.staging, self.regions = every[1:]
        # Which replicas ``slots`` hold: (layer, placement), or None. Parameters change only between
        # steps, and every backward follows a forward of its own step, so this says enough.
        self.held: tuple | None = None

    def main_parameters(self, weights: Experts) -> Experts:
        """The mains in the compute dtype: ``weights`` themselves, or their copy in ``mains``."""
        if self.mains is None:
            return weights
        for buffer, weight in zip(self.mains, weights):
            buffer.copy_(weight)
        return self.mains

    @property
    def nbytes(self) -> int:
        every = (*(self.mains or ()), *self.slots, *self.staging, *self.regions)
        return sum(buffer.nbytes for buffer in every)


def buffer_bytes(
    expert_bytes: int, *, experts: int, ranks: int, replica_slots: int, mains: bool
) -> int:
    """Bytes of one rank by formula: (e + S + E + S) * |W|, without e where mains are not copied
    (``mains``), and without E where there are no slots."""
    copied = experts // ranks if mains else 0
    arriving = experts if replica_slots else 0
    return (copied + 2 * replica_slots + arriving) * expert_bytes
