"""Token shuffling under TP + EP: tokens sit on the rank that holds their next experts.

With sequence parallelism the residual stream is cut over the TP ranks between attention layers: an
all-gather before attention and a reduce-scatter after it move every token anyway. Both stay as they
are; what changes is which token lies in which place. The gathered rows are permuted to canonical
order before the projections of attention and to the next order before its output projection, so
rotary embeddings, masks and positions never see the shuffle, and the two collectives carry not one
byte more. Only the residual rows follow by an exchange of their own, since adding them before the
reduction would round them once more in every layer.

The order of layer l follows from the experts that its tokens chose in the up to three layers
before. All ranks of the TP group see those ids (4*K bytes a token, against 2*D of a row) and
derive the same order. Letters: B batch, L sequence, T = B*L tokens of the TP group, D width, K
top-k, P TP ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.config import derive
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.qwen3.model import Qwen3TransformerBlock

from topoep_titan.placement.shuffle import Predictor, assign_evenly, fit_predictor
from topoep_titan.titan.routed_experts import ReplicatedRoutedExperts

HISTORY = 3  # layers that foretell the next
PASSES = 16  # the last ones, whose tokens the predictors are fitted on


@dataclass(kw_only=True, slots=True)
class ShuffleConfig:
    enabled: bool = False
    """Move tokens to the rank of their next experts inside each TP group. Needs tensor parallelism
    with sequence parallelism and placement.strategy = "correlated", at whose refreshes the
    predictors are fitted; until the first one the order is canonical."""


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


def permuted(x_BLX: Tensor, index_T: Tensor) -> Tensor:
    return x_BLX.flatten(0, 1).index_select(0, index_T).view(x_BLX.shape)


class TokenShuffle:
    """Of one model on one rank: the current order and the experts chosen so far in this pass."""

    def __init__(self, blocks: dict[int, "ShuffledBlock"], group: dist.ProcessGroup, size: int):
        """``size``: tokens that this TP group samples for the predictors, in all layers alike."""
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.layers = {number: block.moe.routed_experts for number, block in blocks.items()}
        self.last = max(blocks)
        self.predictors: dict[int, Predictor] = {}
        self.orders: dict[int, tuple[Order | None, Order | None]] = {}  # before, after attention
        self.history: list[Tensor] = []  # canonical ids (T, K), the last layer first
        self.order: Order | None = None  # None is canonical
        top_k = next(iter(self.layers.values())).config.token_dispatcher.top_k
        self.sample_LNK = torch.zeros(len(self.layers), size, top_k, dtype=torch.int16)
        self.seen = 0  # tokens sampled since the last refit
        self.random = torch.Generator().manual_seed(dist.get_rank() // self.ranks)
        members = dist.get_process_group_ranks(group)
        first = next(iter(self.layers.values()))
        expert_ranks = dist.get_process_group_ranks(first.group)
        self.columns = [expert_ranks.index(member) for member in members]
        for block in blocks.values():
            block.connect(self)

    def orders_of(self, layer: int, batch: int) -> tuple[Order | None, Order | None]:
        """The order before and after a layer's attention; the same when it is run again."""
        if _recomputing():
            return self.orders[layer]
        if layer == min(self.layers):
            self.history, self.order = [], None
        before = self.order
        if layer in self.predictors and self.history:
            scores_TR = self.predictors[layer].scores(self.history)
            rank_T = assign_evenly(scores_TR[:, self.columns])
            self.order = Order.of(rank_T, batch, self.ranks)
        self.orders[layer] = before, self.order
        return self.orders[layer]

    def remember(self, layer: int, ids_BLK: Tensor, training: bool) -> None:
        """What the layer's router chose for the tokens that lie here."""
        if _recomputing():
            return
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
        index = sorted(self.layers).index(layer)
        self.sample_LNK[index, self.slots.to(ids_NK.device)] = ids_NK.to(torch.int16)

    def refit(self) -> None:
        """Predictors for the experts' present placement, from all groups' samples. Collective."""
        mine = self.sample_LNK[:, : self.seen].cpu()
        everyone: list[Tensor] = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        ids_LNK = torch.cat(everyone[:: self.ranks], dim=1)  # ranks of one group sampled alike
        self.seen = 0
        if not ids_LNK.shape[1]:
            return
        for index, (layer, module) in enumerate(sorted(self.layers.items())):
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

    # --- checkpoints: DCP calls these on the entry "shuffle"

    def state_dict(self) -> dict[str, Any]:
        """Sample and predictors, of fixed shapes, under keys of this rank."""
        tables = {}
        for index, (layer, module) in enumerate(sorted(self.layers.items())):
            rows = min(index, HISTORY) * module.main_E.numel() + 1
            empty = torch.zeros(rows, module.cluster.ranks)
            fitted = self.predictors.get(layer)
            tables[str(layer)] = fitted.table_XR.cpu() if fitted else empty
        return {
            f"rank{dist.get_rank()}": {
                "fitted": torch.tensor(bool(self.predictors)),
                "tables": tables,
                "sample_LNK": self.sample_LNK.cpu(),
                "seen": torch.tensor(self.seen),
                "random": self.random.get_state(),
            }
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine = state[f"rank{dist.get_rank()}"]
        self.sample_LNK, self.seen = mine["sample_LNK"].clone(), int(mine["seen"])
        self.random.set_state(mine["random"].cpu())
        if mine["fitted"]:
            for layer in sorted(self.layers)[1:]:
                self._install(layer, mine["tables"][str(layer)].clone())


def follow(
    x_BLD: Tensor, before: Order | None, after: Order | None, group: dist.ProcessGroup
) -> Tensor:
    """This rank's residual rows in one order, exchanged over the TP group into another."""
    if before is after:
        return x_BLD
    batch, shard, _ = x_BLD.shape
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    canonical_T = torch.arange(ranks, device=x_BLD.device).repeat_interleave(shard).repeat(batch)
    canonical = Order.of(canonical_T, batch, ranks)
    before, after = before or canonical, after or canonical

    def rank_of(order: Order) -> Tensor:
        return order.place_T % (shard * ranks) // shard  # by canonical position

    def mine(order: Order) -> Tensor:
        """Canonical positions of this rank's places, in order."""
        return order.source_T.view(batch, ranks, shard)[:, rank].flatten()

    here_N, there_N = mine(before), mine(after)
    to_N, from_N = rank_of(after)[here_N], rank_of(before)[there_N]
    # Both sides of a pair of ranks list its common tokens by canonical position.
    tokens = len(canonical_T)
    send_N, receive_N = (
        torch.argsort(to_N * tokens + here_N),
        torch.argsort(from_N * tokens + there_N),
    )
    splits = torch.stack([torch.bincount(n, minlength=ranks) for n in (to_N, from_N)])
    sent, received = splits.tolist()
    arrived_ND = _Exchange.apply(x_BLD.flatten(0, 1)[send_N], sent, received, group)
    return arrived_ND[torch.argsort(receive_N)].view(x_BLD.shape)


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; backward sends the gradients the same way back."""

    @staticmethod
    def forward(ctx, rows, sent: list[int], received: list[int], group):
        ctx.splits, ctx.group = (sent, received), group
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx, grad):
        sent, received = ctx.splits
        rows = grad.new_empty(sum(sent), grad.shape[1])
        dist.all_to_all_single(rows, grad.contiguous(), sent, received, group=ctx.group)
        return rows, None, None, None


class ShuffledBlock(Qwen3TransformerBlock):
    """Its attention takes tokens in one order and leaves them in the next."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        layer: int

    def __init__(self, config: Config):
        super().__init__(config)
        self.layer = config.layer
        self.shuffle: TokenShuffle | None = None

    def connect(self, shuffle: TokenShuffle) -> None:
        self.shuffle = shuffle
        self.attention.qkv_linear.register_forward_pre_hook(self._to_canonical)
        self.attention.wo.register_forward_pre_hook(self._to_next)
        self.moe.routed_experts.register_forward_pre_hook(self._remember, with_kwargs=True)

    def forward(self, x: Tensor, attention_masks, positions: Tensor | None = None) -> Tensor:
        if self.shuffle is None:
            return super().forward(x, attention_masks, positions)
        self.before, self.after = self.shuffle.orders_of(self.layer, len(x))
        attended = self.attention(self.attention_norm(x), attention_masks, positions)
        x = follow(x, self.before, self.after, self.shuffle.group) + attended
        x = x + self.moe(self.ffn_norm(x))
        if self.layer == self.shuffle.last:  # the final norm and the loss want canonical order
            x = follow(x, self.after, None, self.shuffle.group)
        return x

    def _to_canonical(self, _: nn.Module, inputs: tuple[Tensor, ...]):
        if self.before is None:
            return None
        return (permuted(inputs[0], self.before.place_T), *inputs[1:])

    def _to_next(self, _: nn.Module, inputs: tuple[Tensor, ...]):
        if self.after is None:
            return None
        return (permuted(inputs[0], self.after.source_T), *inputs[1:])

    def _remember(self, module: ReplicatedRoutedExperts, inputs: tuple, keywords: dict) -> None:
        ids_BLK = keywords["topk_expert_ids_BLK"] if keywords else inputs[2]
        self.shuffle.remember(self.layer, ids_BLK.detach(), module.training)


def shuffle_blocks(layers: list[TransformerBlock.Config]) -> None:
    """Replace the blocks of a model's config by ones that can shuffle; names stay."""
    for number, block in enumerate(layers):
        layers[number] = derive(block, ShuffledBlock.Config, layer=number)


def shuffled_blocks(model_parts: Sequence[nn.Module]) -> dict[int, ShuffledBlock]:
    modules = (module for part in model_parts for module in part.modules())
    return {module.layer: module for module in modules if isinstance(module, ShuffledBlock)}


def _recomputing() -> bool:
    """Whether activation checkpointing runs a layer again inside backward."""
    return torch._C._current_graph_task_id() != -1
