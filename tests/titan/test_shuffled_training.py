"""Token shuffling on TP + EP: orders by hand, and the same losses as without it."""

import shutil

import pytest
import torch

from tests.ranks import free_port
from tests.titan.test_expert_placement import CORRELATED
from tests.titan.training_cases import train
from topoep_titan.titan.shuffle import Order, permuted

LAYOUTS = {
    "TP2 = EP2": (2, ["--parallelism.tensor-parallel-degree", "2",
                      "--parallelism.expert-parallel-degree", "2"]),
    "TP4 = EP4": (4, ["--parallelism.tensor-parallel-degree", "4", "--model.n-heads", "4",
                      "--model.n-kv-heads", "4", "--model.head-dim", "16",
                      "--parallelism.expert-parallel-degree", "4"]),
    "TP2 in EP4": (4, ["--parallelism.tensor-parallel-degree", "2",
                       "--parallelism.expert-parallel-degree", "4",
                       "--training.local-batch-size", "4"]),
}  # fmt: skip
DEEP = ["--model.n-layers", "3"]


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


@pytest.mark.ranks
def test_a_shuffled_run_resumes_bit_for_bit_and_recomputes(trainers, folder):
    """Full activation checkpointing; killed after step 12, with predictors from step 7."""
    port = free_port()
    run = folder / f"run-{port}"
    settings = [
        *LAYOUTS["TP2 = EP2"][1], *DEEP, *CORRELATED, "--shuffle.enabled", "--training.steps", "16",
        "--checkpoint.enable", "--checkpoint.interval", "12", "activation-checkpoint:full",
    ]  # fmt: skip

    def trained() -> list[dict]:
        results = trainers.run(train, 2, port, str(folder), settings)
        (steps,) = [steps for steps in results if steps is not None]
        return steps

    unbroken = trained()
    shutil.rmtree(run / "checkpoint" / "step-16")
    (run / "result.json").unlink()
    assert [step["loss_hex"] for step in trained()] == [step["loss_hex"] for step in unbroken]


@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shuffled_training_has_the_same_losses(trainers, folder, layout):
    world, settings = LAYOUTS[layout]

    def trained(*arguments: str) -> list[dict]:
        arguments = [*settings, *DEEP, *arguments]
        results = trainers.run(train, world, free_port(), str(folder), arguments)
        (steps,) = [steps for steps in results if steps is not None]
        return steps

    shuffled = trained(*CORRELATED, "--shuffle.enabled")
    plain = trained("--topoep.dispatcher", "dedup-node")
    losses, reference = (
        torch.tensor([step["loss"] for step in steps], dtype=torch.float64)
        for steps in (shuffled, plain)
    )
    assert losses.numel() == 20
    assert ((losses - reference).abs() / reference).max() < 1e-5
    # Tokens did move: more of their experts are where they are than without (1 / EP).
    local, before = ([step["locality"] for step in steps] for steps in (shuffled, plain))
    assert sum(local[7:]) > sum(before[7:])
