"""What placement needs to know of the routing: co-selection counts, and a sample of expert sets.

The sets themselves are kept, not only the counts of pairs: the cost of a placement is exact in
sets. 8,192 tokens at top-8 are 128 KiB a layer.

Letters: T tokens, K top-k, E experts, N tokens of the sample.
"""

import torch
from torch import Tensor

from topoep_titan.placement.sets import check_ids


def coselection(ids_TK: Tensor, experts: int) -> Tensor:
    """float64 (E, E): tokens that chose both experts; 0 on the diagonal."""
    check_ids(ids_TK, experts)
    chosen_TE = torch.zeros(len(ids_TK), experts, dtype=torch.float64)
    chosen_TE.scatter_(1, ids_TK.long(), 1.0)
    return (chosen_TE.T @ chosen_TE).fill_diagonal_(0.0)


def pearson(a_EE: Tensor, b_EE: Tensor) -> float:
    """Correlation of two co-selection matrices over all pairs, each once."""
    i, j = torch.triu_indices(*a_EE.shape, offset=1)
    return float(torch.corrcoef(torch.stack([a_EE[i, j], b_EE[i, j]]))[0, 1])


class SetSample:
    """The last N of some tokens' expert sets, a few random ones of every microbatch.

    Few of many microbatches rather than one microbatch whole: tokens of one document choose alike,
    which biases the statistics more than a small sample does.
    """

    def __init__(self, size: int, per_microbatch: int, seed: int):
        self.size, self.per_microbatch = size, per_microbatch
        self.random = torch.Generator().manual_seed(seed)
        self.sets_NK: Tensor | None = None  # int16, on the device of the ids
        self.seen = 0

    def add(self, ids_TK: Tensor) -> None:
        """Without a wait for the device: which tokens are taken is drawn on the host."""
        count = min(self.per_microbatch, self.size)
        taken = torch.randint(len(ids_TK), (count,), generator=self.random)
        place = torch.arange(self.seen, self.seen + count) % self.size
        if self.sets_NK is None:
            self.sets_NK = ids_TK.new_zeros(self.size, ids_TK.shape[1], dtype=torch.int16)
        device = ids_TK.device
        self.sets_NK = self.sets_NK.to(device)
        self.sets_NK[place.to(device)] = ids_TK[taken.to(device)].to(torch.int16)
        self.seen += count

    def drain(self) -> Tensor:
        """int16 (at most N, K) on the host; starts over."""
        if self.sets_NK is None:
            return torch.zeros(0, 1, dtype=torch.int16)
        taken = self.sets_NK[: min(self.seen, self.size)].cpu()
        self.seen = 0
        return taken.clone()

    def state(self, top_k: int) -> dict[str, Tensor]:
        """What a checkpoint keeps, of the same shape whatever was sampled so far."""
        sets_NK = self.sets_NK
        if sets_NK is None:
            sets_NK = torch.zeros(self.size, top_k, dtype=torch.int16)
        return {
            "sets_NK": sets_NK.cpu(),
            "seen": torch.tensor(self.seen),
            "random": self.random.get_state(),
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """The sample on the host; it moves to the device of the next ids."""
        self.sets_NK, self.seen = state["sets_NK"].clone(), int(state["seen"])
        self.random.set_state(state["random"].cpu())
