"""Experts that move between steps change nothing but where they are."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import free_port
from tests.titan.training_cases import _build, _close, train
from topoep_titan.cluster import ModelDims, load_cluster
from topoep_titan.execution.lane import ThreadLane
from topoep_titan.execution.layer import Engine, run_layer
from topoep_titan.execution.transport import CollectiveTransport
from topoep_titan.placement.refresh import position_of
from topoep_titan.planning import PLANNERS
from topoep_titan.planning.plan import contiguous_mains
from topoep_titan.titan.expert_placement import Extent, exchange_rows

E, D, F, K, T = 8, 12, 8, 3, 16


# --- the layer


def five_steps(rank: int, ranks: int, mains: list[torch.Tensor]):
    """Adam in float64 on this rank's experts; ``mains[i]`` is the placement during step i.

    Returns what the layer put out in every step, and the experts in logical order at the end.
    """
    generator = torch.Generator().manual_seed(3)
    whole = [
        torch.randn(shape, generator=generator, dtype=torch.float64) / 3
        for shape in ((E, F, D), (E, D, F), (E, F, D))
    ]
    main_E = mains[0]
    weights = [w[main_E == rank].clone().requires_grad_() for w in whole]
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    cluster = load_cluster("h800_4x8").resized(ranks, 2)
    transport, outputs = CollectiveTransport(dist.group.WORLD, 2), []
    extents = {r: Extent(r * (E // ranks), E // ranks, ()) for r in range(ranks)}
    for step, next_E in enumerate(mains):
        if not torch.equal(next_E, main_E):
            from_E = position_of(main_E)[torch.argsort(next_E, stable=True)]
            for weight in weights:
                state = optimizer.state[weight]
                for tensor in (weight.detach(), state["exp_avg"], state["exp_avg_sq"]):
                    exchange_rows(tensor, from_E, extents)
            main_E = next_E
        engine = Engine(
            planner=lambda load_RE: PLANNERS["topoep"](
                load_RE, main_E=main_E, cluster=cluster, model_dims=ModelDims(D, 1),  # noqa: B023
                replica_slots=1,
            ),
            main_E=main_E, replica_slots=1, dispatcher="dedup-node", chunks=1,
            compute_dtype=torch.float64, transport=transport, lane=ThreadLane(), verify_plan=True,
        )  # fmt: skip
        tokens = torch.Generator().manual_seed(100 * step + rank)
        x_TD = torch.randn(T, D, generator=tokens, dtype=torch.float64)
        scores_TK = torch.rand(T, K, generator=tokens, dtype=torch.float64)
        ids_TK = torch.rand(T, E, generator=tokens).topk(K).indices
        counts_E = torch.bincount(ids_TK.flatten(), minlength=E)
        optimizer.zero_grad()
        out_TD, _ = run_layer(x_TD, scores_TK, ids_TK, counts_E, tuple(weights), engine)
        out_TD.square().sum().backward()
        optimizer.step()
        outputs.append(out_TD.detach())
    final = []
    for weight in weights:
        parts = [torch.empty_like(weight) for _ in range(ranks)]
        dist.all_gather(parts, weight.detach())
        final.append(torch.cat(parts)[position_of(main_E)])
    return outputs, final


@pytest.mark.ranks
def test_five_float64_steps_do_not_notice_two_refreshes(four_ranks):
    still = contiguous_mains(4, E)
    first, second = torch.tensor([3, 1, 0, 2, 0, 1, 3, 2]), torch.tensor([3, 0, 1, 2, 2, 1, 3, 0])
    unmoved = four_ranks.run(five_steps, [still] * 5)
    moved = four_ranks.run(five_steps, [still, still, first, first, second])
    for (outputs, final), (expected, whole) in zip(moved, unmoved):
        for ours, reference in zip([*outputs, *final], [*expected, *whole]):
            assert (ours - reference).abs().max() <= 1e-12 * reference.abs().max()


# --- training

EAGER = Path(__file__).parent / "slow_compute.toml"  # moves pay at every refresh
CORRELATED = [
    "--topoep.cluster", str(EAGER), "--placement.balance-weight", "1000",
    "--placement.strategy", "correlated", "--placement.refresh-steps", "7", "--topoep.dispatcher",
    "dedup-node", "--placement.sample-tokens", "512",
]  # fmt: skip
LAYOUTS = {
    "EP2 x FSDP2": [
        "--parallelism.expert-parallel-degree", "2", "--training.local-batch-size", "2",
    ],
    "PP2 x EP2": [
        "--parallelism.expert-parallel-degree", "2", "--parallelism.pipeline-parallel-degree", "2",
        "--training.local-batch-size", "4",
    ],
    # Replicas are planned by the rows that the present placement leaves.
    "EP4, joint in rows": [
        "--parallelism.expert-parallel-degree", "4", "--training.local-batch-size", "2",
        "--topoep.planner", "joint", "--topoep.verify-plan",
    ],
}  # fmt: skip


def train_placed(rank: int, ranks: int, port: int, folder: str, arguments: list[str]):
    """Train on all ranks: (step records where they are, placement of this rank's layers)."""
    import topoep_titan.titan.expert_placement as expert_placement

    if "joint" in arguments:  # replicas level the load anyway, and rows alone pay for no move here
        expert_placement.move_seconds = lambda *_, **__: -math.inf
    trainer = _build(rank, ranks, port, folder, arguments, "tiny.toml")
    try:
        trainer.train()
        steps, _ = trainer.metrics_processor.step_log.read()
        mains = {number: module.main_E for number, module in trainer.placement.layers.items()}
        return steps if trainer.metrics_processor.writes else None, mains
    finally:
        _close(trainer)


@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_with_two_refreshes_has_the_losses_of_one_process(trainers, folder, layout):
    settings = [*LAYOUTS[layout], *CORRELATED]
    results = trainers.run(train_placed, free_port(), str(folder), settings)
    (steps,) = [steps for steps, _ in results if steps is not None]
    alone, *_ = trainers.run(train, 1, free_port(), str(folder), ["--topoep.planner", "none"])
    losses, reference = (
        torch.tensor([step["loss"] for step in each], dtype=torch.float64)
        for each in (steps, alone)
    )
    assert losses.numel() == 20
    assert ((losses - reference).abs() / reference).max() < 1e-5
    placed = {number: main_E for _, mains in results for number, main_E in mains.items()}
    assert len(placed) == 2
    for main_E in placed.values():
        assert main_E.tolist() != sorted(main_E.tolist())
    replicas = [step["num_replicas"] for step in steps]
    assert all(replicas[14:]) == any(replicas) == ("joint" in layout)
