"""The orders in which the tokens of a TP group lie, layer by layer, foretold from their routing.

The order of layer l follows from the experts that its tokens chose in the up to three layers
before, of the same pipeline stage: every stage begins and ends in canonical order. All ranks of the
TP group see those ids (4*K bytes a token, against 2*D of a row) and derive the same order. Letters:
B batch, L sequence, T = B*L tokens of the TP group, N sampled tokens, K top-k, P TP ranks, R ranks
of the EP group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from topoep_titan.placement.shuffle import Predictor, assign_evenly, fit_predictor
from topoep_titan.titan.routed_experts import ReplicatedRoutedExperts

HISTORY = 3  # layers that foretell the next
PASSES = 16  # the last ones, whose tokens the predictors are fitted on


@dataclass(frozen=True)
class Order:
    """Where the tokens of a TP group lie when their shards are gathered."""

    source_T: Tensor  # canonical position (b*L + l) of the token in each gathered place
    place_T: Tensor  # the inverse: gathered place of each canonical position

    @staticmethod
    def of(rank_T: Tensor, batch: int, ranks: int) -> "Order":
        """``rank_T``: TP rank of each canonical position, T/P on each; ascending within a rank."""
        length = len(rank_T) // batch
        shard = length // ranks
        places = torch.arange(batch * length, device=rank_T.device).view(batch, ranks, shard)
        source_T = torch.empty_like(rank_T)
        source_T[places.transpose(0, 1).flatten()] = torch.argsort(rank_T, stable=True)
        return Order(source_T, torch.argsort(source_T))


Orders = tuple[Order | None, Order | None]  # before a layer's attention and after; None: canonical


def permuted(x_BLX: Tensor, index_T: Tensor) -> Tensor:
    return x_BLX.flatten(0, 1).index_select(0, index_T).view(x_BLX.shape)


class PartOrders:
    """Of one model part: its tokens' current order, and the experts chosen so far in this pass."""

    def __init__(
        self,
        numbers: Sequence[int],
        layers: dict[int, ReplicatedRoutedExperts],
        group: dist.ProcessGroup,
        size: int,
    ):
        """``numbers``: of all layers of the part; ``layers``: those with experts. ``size``: tokens
        that this TP group samples for the predictors, in all layers alike."""
        self.group, self.ranks = group, dist.get_world_size(group)
        self.first, self.last = min(numbers), max(numbers)
        self.layers = dict(sorted(layers.items()))
        self.predictors: dict[int, Predictor] = {}
        self.history: list[Tensor] = []  # canonical ids (T, K), the last layer first
        self.order: Order | None = None
        modules = list(self.layers.values())
        top_k = modules[0].config.token_dispatcher.top_k if modules else 1
        self.sample_LNK = torch.zeros(len(modules), size, top_k, dtype=torch.int16)
        self.seen = 0  # tokens sampled since the last fit
        self.random = torch.Generator().manual_seed(dist.get_rank() // self.ranks)
        if modules:
            expert_ranks = dist.get_process_group_ranks(modules[0].group)
            self.columns = [expert_ranks.index(r) for r in dist.get_process_group_ranks(group)]

    def orders_of(self, layer: int, batch: int) -> Orders:
        """The order before and after a layer's attention. Layers ask once a pass, in order."""
        if layer == self.first:
            self.history, self.order = [], None
        before = self.order
        if layer in self.predictors and self.history:
            scores_TR = self.predictors[layer].scores(self.history)
            rank_T = assign_evenly(scores_TR[:, self.columns])
            self.order = Order.of(rank_T, batch, self.ranks)
        return before, self.order

    def remember(self, layer: int, ids_BLK: Tensor, training: bool) -> None:
        """What the layer's router chose for the tokens that lie here."""
        ids_BLK = ids_BLK.to(torch.int32)  # NCCL has no int16
        shards = [torch.empty_like(ids_BLK) for _ in range(self.ranks)]
        dist.all_gather(shards, ids_BLK.contiguous(), group=self.group)
        ids_BLK = torch.cat(shards, dim=1)
        if self.order is not None:
            ids_BLK = permuted(ids_BLK, self.order.place_T)
        self.history = [ids_BLK.flatten(0, 1), *self.history][:HISTORY]
        if training:
            self._sample(layer)

    def _sample(self, layer: int) -> None:
        """Keep the experts of a few tokens of this pass, the same tokens in every layer."""
        size = self.sample_LNK.shape[1]
        if layer == min(self.layers):
            count = -(-size // PASSES)
            self.taken = torch.randint(len(self.history[0]), (count,), generator=self.random)
            self.slots = torch.arange(self.seen, self.seen + count) % size
            self.seen += count
        ids_NK = self.history[0][self.taken.to(self.history[0].device)]
        self.sample_LNK = self.sample_LNK.to(ids_NK.device)
        index = list(self.layers).index(layer)
        self.sample_LNK[index, self.slots.to(ids_NK.device)] = ids_NK.to(torch.int16)

    def drain(self) -> Tensor:
        """int16 (layers, at most N, K) on the host; starts over."""
        sample_LNK, self.seen = self.sample_LNK[:, : self.seen].cpu(), 0
        return sample_LNK

    def fit(self, ids_LNK: Tensor) -> None:
        """Predictors of each layer but the first, for the experts' present placement."""
        for index, (layer, module) in enumerate(self.layers.items()):
            if index:
                history = [*ids_LNK[max(0, index - HISTORY) : index].flip(0)]
                fitted = fit_predictor(
                    history, ids_LNK[index], module.main_E, ranks=module.cluster.ranks
                )
                self._install(layer, fitted.table_XR)

    def _install(self, layer: int, table_XR: Tensor) -> None:
        module = self.layers[layer]
        device = module.inner_experts.w1_EFD.device
        self.predictors[layer] = Predictor(table_XR.to(device), module.main_E.numel())

    def state(self) -> dict[str, Any]:
        """Sample and predictors, of fixed shapes."""
        tables = {}
        for index, (layer, module) in enumerate(self.layers.items()):
            rows = min(index, HISTORY) * module.main_E.numel() + 1
            empty = torch.zeros(rows, module.cluster.ranks)
            fitted = self.predictors.get(layer)
            tables[str(layer)] = fitted.table_XR.cpu() if fitted else empty
        return {
            "fitted": torch.tensor(bool(self.predictors)),
            "tables": tables,
            "sample_LNK": self.sample_LNK.cpu(),
            "seen": torch.tensor(self.seen),
            "random": self.random.get_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.sample_LNK, self.seen = state["sample_LNK"].clone(), int(state["seen"])
        self.random.set_state(state["random"].cpu())
        if state["fitted"]:
            for layer in list(self.layers)[1:]:
                self._install(layer, state["tables"][str(layer)].clone())


class TokenShuffle:
    """Of all model parts on one rank: refits their predictors, keeps them in checkpoints."""

    def __init__(self, parts: list[PartOrders], group: dist.ProcessGroup):
        self.parts, self.ranks = parts, dist.get_world_size(group)

    def refit(self) -> None:
        """Predictors from the samples of all TP groups that hold the same layers. Collective."""
        mine = {tuple(part.layers): part.drain() for part in self.parts}
        everyone: list[dict] = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        for part in self.parts:
            groups = everyone[:: self.ranks]  # ranks of one TP group sampled alike
            samples = [sampled[key] for sampled in groups if (key := tuple(part.layers)) in sampled]
            ids_LNK = torch.cat(samples, dim=1)
            if ids_LNK.shape[1]:
                part.fit(ids_LNK)

    # --- checkpoints: DCP calls these on the entry "shuffle"

    def state_dict(self) -> dict[str, Any]:
        """Every part's state, under keys of this rank."""
        parts = {f"part{i}": part.state() for i, part in enumerate(self.parts)}
        return {f"rank{dist.get_rank()}": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for i, part in enumerate(self.parts):
            part.restore(state[f"rank{dist.get_rank()}"][f"part{i}"])
