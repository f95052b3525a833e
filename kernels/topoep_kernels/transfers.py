"""Replica transfers over peer-mapped memory: parameters pulled, gradients pushed and summed.

Letters: R ranks, E experts, e = E/R mains a rank, S replica slots a rank, G = R*(e+S) slots,
P parts of an expert (w1, w2, w3: alike in bytes), n elements of a part. The plan's ``expert_G`` is
read in device memory; experts whose main is not mapped here are left out. The caller fences (see
csrc/device/transfers.cu). With CPU tensors everything runs in the SIMT machine, for tests.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from topoep_kernels.device import launch

BLOCKS = 16  # an estimate: 16 x 96 KiB in flight cover an NVLink direction; measured nowhere yet


def addresses(buffers: Sequence, device: torch.device) -> Tensor:
    """int64: nested addresses, (P, R) of all ranks' parts (0 = not mapped here) or (P,) of the own.
    Once per buffer."""
    return torch.tensor(buffers, dtype=torch.int64, device=device)


def main_places(main_E: Tensor) -> Tensor:
    """int32 (E,): rank * e + index (ascending id) of each expert's main. Once per placement."""
    place_E = torch.empty(main_E.numel(), dtype=torch.int32, device=main_E.device)
    order_E = torch.argsort(main_E, stable=True)
    place_E[order_E] = torch.arange(main_E.numel(), dtype=torch.int32, device=main_E.device)
    return place_E


def pull_replicas(
    expert_G: Tensor, place_E: Tensor, mains_PR: Tensor, slots_P: Tensor, part_bytes: int, rank: int
) -> None:
    """Parameters of the mains (e, ...) at ``mains_PR`` into this rank's slots (S, ...), whose
    addresses are ``slots_P``."""
    _transfer(expert_G, place_E, mains_PR, slots_P, part_bytes, rank, pull=True)


def push_gradients(
    expert_G: Tensor,
    place_E: Tensor,
    regions_PR: Tensor,
    grads_P: Tensor,
    part_bytes: int,
    rank: int,
) -> None:
    """Gradients of this rank's slots (S, ...), at ``grads_P``, into [this rank, index] of the
    regions (R, e, ...) at ``regions_PR`` on the mains' ranks."""
    _transfer(expert_G, place_E, regions_PR, grads_P, part_bytes, rank, pull=False)


def reduce_gradients(total_en: Tensor, region_Ren: Tensor, expert_G: Tensor, rank: int) -> None:
    """Add to ``total_en`` (fp32, in place) the regions of all ranks that host a replica, in
    ascending rank; others are neither read nor need clearing. Regions: float32 or bfloat16."""
    ranks, mains = region_Ren.shape[:2]
    elements = region_Ren[0, 0].numel()
    kinds = {torch.float32: 0, torch.bfloat16: 1}
    if region_Ren.dtype not in kinds or total_en.dtype != torch.float32 or elements % 4:
        raise ValueError(
            f"reduce_gradients adds float32 or bfloat16 regions of a multiple of 4 elements to "
            f"float32, got {region_Ren.dtype} of {elements} elements to {total_en.dtype}"
        )
    slots = expert_G.numel() // ranks - mains
    sizes = (rank, ranks, mains, slots, elements, kinds[region_Ren.dtype])
    launch("reduce", total_en, region_Ren, expert_G, *sizes)


def _transfer(
    expert_G: Tensor,
    place_E: Tensor,
    base_PR: Tensor,
    own_P: Tensor,
    part_bytes: int,
    rank: int,
    *,
    pull: bool,
) -> None:
    parts, ranks = base_PR.shape
    mains = place_E.numel() // ranks
    slots = expert_G.numel() // ranks - mains
    if own_P.shape != (parts,) or part_bytes % 16:
        raise ValueError(
            f"{parts} parts in multiples of 16 bytes are moved, got {tuple(own_P.shape)} addresses "
            f"of {part_bytes} bytes"
        )
    launch(
        "transfer", expert_G, place_E, base_PR, own_P, rank, ranks, mains, slots, parts,
        part_bytes, int(pull), BLOCKS,
    )  # fmt: skip
