"""Token shuffling on TP + EP: orders by hand, and the same losses as without it."""

import shutil

import pytest
import torch
import torch.distributed as dist

from tests.ranks import free_port
from tests.titan.test_expert_placement import CORRELATED
from tests.titan.training_cases import _build, _close, train
from topoep_titan.titan.shuffle import OrderedProjection, _with_places, follow
from topoep_titan.titan.token_order import Order, permuted

SIXTEEN = ["--model.n-heads", "4", "--model.n-kv-heads", "4", "--model.head-dim", "16"]
SHUFFLED = [*CORRELATED, "--shuffle.enabled"]
LAYOUTS = {
    "TP4 = EP4": [
        "--parallelism.tensor-parallel-degree", "4", "--parallelism.expert-parallel-degree", "4",
    ],
    "TP2 in EP4": [
        "--parallelism.tensor-parallel-degree", "2", "--parallelism.expert-parallel-degree", "4",
        "--training.local-batch-size", "4",
    ],
    "PP2 x TP2 = EP2": [
        "--parallelism.pipeline-parallel-degree", "2", "--parallelism.tensor-parallel-degree", "2",
        "--parallelism.expert-parallel-degree", "2",
        "--parallelism.pipeline-parallel-microbatch-size", "2",
    ],
}  # fmt: skip
FOUR, THREE = ["--model.n-layers", "4"], ["--model.n-layers", "3"]
FULL_AC, FOLDED = "activation-checkpoint:full", ["--shuffle.residual", "folded"]
INTERLEAVED = ["--parallelism.pipeline-parallel-schedule", "Interleaved1F1B"]
# (recipe, layout, what changes the model, what must change nothing)
RUNS = {
    "Qwen3, TP = EP": ("tiny.toml", "TP4 = EP4", SIXTEEN, []),
    "Qwen3, TP in EP, folded": ("tiny.toml", "TP2 in EP4", SIXTEEN, FOLDED),
    # Twelve steps: in eight layers a near-tie of some router flips sooner.
    "Qwen3, interleaved, full AC": (
        "tiny.toml", "PP2 x TP2 = EP2", ["--model.n-layers", "8", "--training.steps", "12"],
        [*INTERLEAVED, FULL_AC],
    ),
    # A dense layer first; two microbatches are accumulated.
    "GLM-4.5": (
        "tiny_glm4_moe.toml", "TP2 in EP4", THREE, ["--training.local-batch-size", "2"],
    ),
    "DeepSeek-V2": ("tiny_deepseek_v2.toml", "TP2 in EP4", THREE, []),
    # Two layers with experts in the second stage; others go forward before a microbatch goes back.
    "DeepSeek-V2, 1F1B, full AC": (
        "tiny_deepseek_v2.toml", "PP2 x TP2 = EP2", FOUR, [*FOLDED, FULL_AC],
    ),
}  # fmt: skip


def test_order_by_hand():
    """Two sequences of four tokens on two ranks: rank 1 gets tokens 0, 1, 6 and 7."""
    order = Order.of(torch.tensor([1, 1, 0, 0, 0, 0, 1, 1]), batch=2, ranks=2)
    # Gathered: sequence 0 holds two places of rank 0, then two of rank 1; sequence 1 likewise.
    assert order.source_T.tolist() == [2, 3, 0, 1, 4, 5, 6, 7]
    x_BLD = torch.arange(8.0).view(2, 4, 1)
    gathered = permuted(x_BLD, order.source_T)
    assert gathered.flatten().tolist() == [2, 3, 0, 1, 4, 5, 6, 7]
    assert torch.equal(permuted(gathered, order.place_T), x_BLD)
    identity = Order.of(torch.tensor([0, 0, 1, 1, 0, 0, 1, 1]), batch=2, ranks=2)
    assert identity.source_T.tolist() == list(range(8))


# --- three layers in float64

B, L, D, LAYERS = 2, 12, 5, 3


class Gather(torch.autograd.Function):
    """Shards along the sequence to the whole; backward sums all ranks' gradients of a shard."""

    @staticmethod
    def forward(ctx, shard):
        return whole(shard)

    @staticmethod
    def backward(ctx, grad):
        return own_sum(grad)


class ReduceScatter(torch.autograd.Function):
    """All ranks' partial sums to this rank's shard."""

    @staticmethod
    def forward(ctx, partial):
        return own_sum(partial)

    @staticmethod
    def backward(ctx, grad):
        return whole(grad)


def whole(shard: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty(shard.shape, dtype=shard.dtype) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard.contiguous())
    return torch.cat(parts, dim=1)


def own_sum(partial: torch.Tensor) -> torch.Tensor:
    total = partial.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()


def tensor_parallel(rank: int, ranks: int, shuffle: bool, folded: bool = False):
    """Layers that mix all positions, between gather and reduce-scatter as attention does, and then
    treat every token by itself; each rank computes a share of the mix. (output, gradients)."""
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) / 3

    input_BLD, grad_BLD = drawn(B, L, D), drawn(B, L, D)
    mixes = [drawn(ranks, L, L).requires_grad_() for _ in range(LAYERS)]
    ranks_T = torch.arange(ranks).repeat_interleave(L // ranks).repeat(B)
    orders = [
        Order.of(ranks_T[torch.randperm(B * L, generator=generator)], B, ranks)
        for _ in range(LAYERS)
    ]
    if not shuffle:
        orders = [None] * LAYERS
    mine = slice(rank * L // ranks, (rank + 1) * L // ranks)
    x_BLD = start_BLD = input_BLD[:, mine].clone().requires_grad_()
    before, group = None, dist.group.WORLD
    projection = OrderedProjection(OrderedProjection.Config(in_features=D, out_features=D))
    projection.weight = torch.nn.Parameter(drawn(D, D))
    for mix, after in zip(mixes, orders):
        gathered = Gather.apply(x_BLD)
        if before is not None:
            gathered = permuted(gathered, before.place_T)
        mixed = torch.einsum("lm,bmd->bld", mix[rank], gathered)
        projection.order = after
        projection.residual = _with_places(x_BLD, before, after, group) if folded else None
        summed = ReduceScatter.apply(projection(mixed))
        x_BLD = summed if folded else follow(x_BLD, before, after, group) + summed
        x_BLD = x_BLD + torch.tanh(x_BLD)  # the MoE's place
        before = after
    x_BLD = follow(x_BLD, before, None, group)
    x_BLD.backward(grad_BLD[:, mine])
    whole_grad = projection.weight.grad.clone()
    dist.all_reduce(whole_grad)
    return [x_BLD.detach(), start_BLD.grad, whole_grad, *(mix.grad for mix in mixes)]


@pytest.mark.ranks
@pytest.mark.parametrize("folded", [False, True])
def test_shuffled_layers_equal_unshuffled_ones_in_float64(four_ranks, folded):
    shuffled = four_ranks.run(tensor_parallel, True, folded)
    for ours, plain in zip(shuffled, four_ranks.run(tensor_parallel, False)):
        for tensor, expected in zip(ours, plain):
            assert (tensor - expected).abs().max() <= 1e-12 * expected.abs().max()


# --- training


@pytest.mark.ranks
def test_a_shuffled_run_resumes_bit_for_bit_and_recomputes(trainers, folder):
    """Full activation checkpointing; killed after step 12, with predictors from step 7."""
    port = free_port()
    run = folder / f"run-{port}"
    settings = [
        *LAYOUTS["TP2 in EP4"], *SIXTEEN, *SHUFFLED, "--training.steps", "16",
        "--checkpoint.enable", "--checkpoint.interval", "12", "activation-checkpoint:full",
    ]  # fmt: skip

    def trained() -> list[dict]:
        return trainers.run(train, 4, port, str(folder), settings)[0]

    unbroken = trained()
    shutil.rmtree(run / "checkpoint" / "step-16")
    (run / "result.json").unlink()
    assert [step["loss_hex"] for step in trained()] == [step["loss_hex"] for step in unbroken]


def train_shuffled(
    rank: int, ranks: int, port: int, folder: str, arguments: list[str], recipe: str
):
    """Train on all ranks: (step records where they are, the last order of each model part)."""
    trainer = _build(rank, ranks, port, folder, arguments, recipe)
    try:
        trainer.train()
        steps, _ = trainer.metrics_processor.step_log.read()
        orders = [part.order and part.order.source_T for part in trainer.shuffle.parts]
        return steps if trainer.metrics_processor.writes else None, orders
    finally:
        _close(trainer)


@pytest.mark.ranks
@pytest.mark.parametrize("name", RUNS)
def test_shuffled_training_has_the_losses_of_one_process(trainers, folder, name):
    recipe, layout, model, changes = RUNS[name]
    settings = [*LAYOUTS[layout], *SHUFFLED, *model, *changes]
    results = trainers.run(train_shuffled, free_port(), str(folder), settings, recipe)
    (shuffled,) = [steps for steps, _ in results if steps is not None]
    alone, *_ = trainers.run(train, 1, free_port(), str(folder), model, recipe)
    losses, reference = (
        torch.tensor([step["loss"] for step in steps], dtype=torch.float64)
        for steps in (shuffled, alone)
    )
    assert losses.numel() in (12, 20)
    assert ((losses - reference).abs() / reference).max() < 1e-5
    # Tokens did move before the last layer of every stage that has two layers with experts.
    moved = [source_T for _, orders in results for source_T in orders if source_T is not None]
    assert len(moved) >= 2
    for source_T in moved:
        assert sorted(source_T.tolist()) == list(range(len(source_T))) != source_T.tolist()
