"""Token shuffling under TP + EP: tokens sit on the rank that holds their next experts.

With sequence parallelism the residual stream is cut over the TP ranks between attention layers: an
all-gather before attention and a reduce-scatter after it move every token anyway. Both stay as they
are; what changes is which token lies in which place (`token_order`). The gathered rows are permuted
to canonical order at the first projections of attention and to the next order before its output
projection, so rotary embeddings, masks and positions never see the shuffle, and the two collectives
carry not one byte more. The residual rows follow by an exchange of their own, or ride in the
reduce-scatter (``residual``). A block is given its orders as an argument, so activation
checkpointing, which keeps a block's arguments, runs it again in the same ones, also when a pipeline
has run other microbatches meanwhile. Letters: B batch, L sequence, T = B*L tokens of the TP group,
D width, K top-k, P TP ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.config import derive
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.common.linear import Linear
from torchtitan.models.qwen3.model import Qwen3TransformerBlock

from topoep_titan.titan.routed_experts import ReplicatedRoutedExperts
from topoep_titan.titan.token_order import Order, Orders, PartOrders, TokenShuffle, permuted

Residual = Literal["exchange", "folded"]


@dataclass(kw_only=True, slots=True)
class ShuffleConfig:
    enabled: bool = False
    """Move tokens to the rank of their next experts inside each TP group. Needs tensor parallelism
    with sequence parallelism and placement.strategy = "correlated", at whose refreshes the
    predictors are fitted; until the first one the order is canonical."""

    residual: Residual = "exchange"
    """How the residual rows follow: by an all-to-all of the rows that change rank, or added to the
    partial sums before the reduce-scatter, which sends nothing more but rounds the residual in the
    compute dtype once for every rank and layer."""


class ShuffledBlock(Qwen3TransformerBlock):
    """Its attention takes tokens in one order and leaves them in the next.

    Stands for the blocks of all three families, which are built of the same parts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        number: int
        residual: Residual

    def __init__(self, config: Config):
        super().__init__(config)
        self.number, self.folded = config.number, config.residual == "folded"
        self.part: PartOrders | None = None

    def connect(self, part: PartOrders) -> None:
        self.part = part
        attention = self.attention
        if hasattr(attention, "qkv_linear"):
            attention.qkv_linear.register_forward_pre_hook(self._to_canonical)
        else:  # latent attention: narrow projections, whose outputs are cheaper to permute
            first = attention.wq_a if attention.q_lora_rank else attention.wq
            for projection in (first, attention.wkv_a):
                projection.register_forward_hook(self._output_to_canonical)
        if self.moe_enabled:
            self.moe.routed_experts.register_forward_pre_hook(self._remember, with_kwargs=True)

    def forward(
        self,
        x: Tensor,
        attention_masks,
        positions: Tensor | None = None,
        orders: Orders = (None, None),
    ) -> Tensor:
        before, after = orders
        self.before, projection = before, self.attention.wo
        folded = self.folded and before is not after
        projection.order = after
        projection.residual = _with_places(x, before, after, self.part.group) if folded else None
        attended = self.attention(self.attention_norm(x), attention_masks, positions)
        if folded:
            x = attended
        elif self.part is not None:
            x = follow(x, before, after, self.part.group) + attended
        else:
            x = x + attended
        x = x + (self.moe if self.moe_enabled else self.feed_forward)(self.ffn_norm(x))
        if self.part is not None and self.number == self.part.last:
            # The next pipeline stage, or the final norm and the loss, want canonical order.
            x = follow(x, after, None, self.part.group)
        return x

    def _to_canonical(self, _: nn.Module, inputs: tuple[Tensor, ...]):
        if self.before is None:
            return None
        return (permuted(inputs[0], self.before.place_T), *inputs[1:])

    def _output_to_canonical(self, _: nn.Module, inputs: tuple, output: Tensor):
        return None if self.before is None else permuted(output, self.before.place_T)

    def _remember(self, module: ReplicatedRoutedExperts, inputs: tuple, keywords: dict) -> None:
        if torch._C._current_graph_task_id() == -1:  # else checkpointing runs the layer again
            ids_BLK = keywords["topk_expert_ids_BLK"] if keywords else inputs[2]
            self.part.remember(self.number, ids_BLK.detach(), module.training)


class OrderedProjection(Linear):
    """Attention's output projection: canonical rows in, partial sums in the next order out.

    Its sharding reduces and scatters what ``forward`` returns.
    """

    order: Order | None = None
    residual: tuple[Tensor, Tensor] | None = None  # (places N, rows (N, D)) of this rank to add

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: Tensor) -> Tensor:
        if self.order is not None:
            input = permuted(input, self.order.source_T)
        partial = super().forward(input)
        if self.residual is not None:
            (place_N, rows_ND), self.residual = self.residual, None
            partial = partial.flatten(0, 1).index_add(0, place_N, rows_ND).view(partial.shape)
        return partial


def shuffle_blocks(layers: list[TransformerBlock.Config], residual: Residual) -> None:
    """Replace the blocks of a model's config by ones that can shuffle; names stay."""
    for number, block in enumerate(layers):
        block.attention.wo = derive(block.attention.wo, OrderedProjection.Config)
        layers[number] = derive(block, ShuffledBlock.Config, number=number, residual=residual)


def connect_blocks(
    model_parts: Sequence[nn.Module], group: dist.ProcessGroup, size: int
) -> TokenShuffle:
    """Let the blocks of this rank's model parts shuffle within the TP group ``group``.

    ``size``: tokens that the group samples for its predictors.
    """
    parts = []
    for model_part in model_parts:
        blocks = dict(_blocks(model_part))
        layers = {n: b.moe.routed_experts for n, (_, b) in blocks.items() if b.moe_enabled}
        part = PartOrders(list(blocks), layers, group, size)
        for number, (outermost, block) in blocks.items():
            block.connect(part)
            # On the wrapper of activation checkpointing, if any: only what is inside runs again.
            outermost.register_forward_pre_hook(_give_orders(part, number), with_kwargs=True)
        parts.append(part)
    return TokenShuffle(parts, group)


def _blocks(model_part: nn.Module) -> Iterator[tuple[int, tuple[nn.Module, ShuffledBlock]]]:
    """(number, (the layer as the model calls it, the block inside))."""
    for layer in model_part.layers.values():
        block = next(module for module in layer.modules() if isinstance(module, ShuffledBlock))
        yield block.number, (layer, block)


def _give_orders(part: PartOrders, number: int):
    def hook(_: nn.Module, inputs: tuple, keywords: dict):
        return inputs, keywords | {"orders": part.orders_of(number, len(inputs[0]))}

    return hook


def follow(
    x_BLD: Tensor, before: Order | None, after: Order | None, group: dist.ProcessGroup
) -> Tensor:
    """This rank's residual rows in one order, exchanged over the TP group into another."""
    if before is after:
        return x_BLD
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    batch, shard, _ = x_BLD.shape
    canonical = _canonical(x_BLD, ranks)
    before, after = before or canonical, after or canonical

    def rank_of(order: Order) -> Tensor:
        return order.place_T % (shard * ranks) // shard  # by canonical position

    here_N, there_N = (_held(order, batch, rank, ranks) for order in (before, after))
    to_N, from_N = rank_of(after)[here_N], rank_of(before)[there_N]
    # Both sides of a pair of ranks list its common tokens by canonical position.
    tokens = batch * shard * ranks
    send_N, receive_N = (
        torch.argsort(to_N * tokens + here_N),
        torch.argsort(from_N * tokens + there_N),
    )
    splits = torch.stack([torch.bincount(n, minlength=ranks) for n in (to_N, from_N)])
    sent, received = splits.tolist()
    arrived_ND = _Exchange.apply(x_BLD.flatten(0, 1)[send_N], sent, received, group)
    return arrived_ND[torch.argsort(receive_N)].view(x_BLD.shape)


def _with_places(
    x_BLD: Tensor, before: Order | None, after: Order | None, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """(gathered places in the next order, rows) of this rank's residual."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    canonical = _canonical(x_BLD, ranks)
    here_N = _held(before or canonical, len(x_BLD), rank, ranks)
    return (after or canonical).place_T[here_N], x_BLD.flatten(0, 1)


def _canonical(x_BLD: Tensor, ranks: int) -> Order:
    position_T = torch.arange(x_BLD.shape[0] * x_BLD.shape[1] * ranks, device=x_BLD.device)
    return Order(position_T, position_T)


def _held(order: Order, batch: int, rank: int, ranks: int) -> Tensor:
    """Canonical positions of the tokens that this rank holds, in the order of its places."""
    return order.source_T.view(batch, ranks, -1)[:, rank].flatten()


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
