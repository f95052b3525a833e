"""What a rank runs in the training tests: a whole job in this process, its losses returned."""

import os
from pathlib import Path

RECIPES = Path(__file__).parent


def train(
    rank: int,
    ranks: int,
    world: int,
    port: int,
    folder: str,
    arguments: list[str],
    recipe: str = "tiny.toml",
):
    """Train ``recipe`` on the first ``world`` ranks; the step records from the loss's rank."""
    if rank >= world:
        return None
    trainer = _build(rank, world, port, folder, arguments, recipe)
    try:
        trainer.train()
        steps, _ = trainer.metrics_processor.step_log.read()
        return steps if trainer.metrics_processor.writes else None
    finally:
        _close(trainer)


def expert_parameters(rank: int, ranks: int, world: int, port: int, folder: str):
    """The first layer's w1 of this rank, and the router's weight, as built."""
    if rank >= world:
        return None
    trainer = _build(rank, world, port, folder, _expert_parallel(world), "tiny.toml")
    try:
        moe = trainer.model_parts[0].layers["0"].moe
        gate = moe.router.gate.weight
        w1_EFD = moe.routed_experts.inner_experts.w1_EFD
        return w1_EFD.to_local().detach().clone(), gate.full_tensor().detach()
    finally:
        _close(trainer)


def observe(rank: int, ranks: int, world: int, port: int, folder: str, arguments: list[str]):
    """One step of ``tiny.toml`` under a clock that advances 0.25 s whenever metrics look at it.

    (what metrics logged, {layer: ids (T, K) as its router chose them, recomputation left out},
    {layer: how many calls of its experts were on record}) of this rank.
    """
    import types

    import torch

    import topoep_titan.titan.metrics as metrics
    from topoep_titan.titan.routed_experts import ReplicatedRoutedExperts

    if rank >= world:
        return None
    ticks = iter(range(10**6))
    metrics.time = types.SimpleNamespace(perf_counter=lambda: 0.25 * next(ticks))
    trainer = _build(rank, world, port, folder, arguments, "tiny.toml")
    chosen, records = {}, {}
    processor, (model,) = trainer.metrics_processor, trainer.model_parts
    inner = {
        layer: next(m for m in block.modules() if isinstance(m, ReplicatedRoutedExperts))
        for layer, block in model.layers.items()
    }

    def keep(layer: str):
        def hook(module, inputs, output):
            if torch._C._current_graph_task_id() == -1:
                chosen.setdefault(int(layer), []).append(output[1].detach().flatten(0, 1))

        return hook

    def log(*values, **named):
        records.update({int(layer): len(experts.records) for layer, experts in inner.items()})
        type(processor).log(processor, *values, **named)

    for layer, block in model.layers.items():
        block.get_submodule("moe.router").register_forward_hook(keep(layer))
    processor.log = log
    try:
        trainer.train()
        steps, _ = processor.step_log.read()
        return steps, {layer: torch.cat(ids) for layer, ids in chosen.items()}, records
    finally:
        _close(trainer)


def held_bytes(rank: int, ranks: int, port: int, folder: str, arguments: list[str], recipe: str):
    """(parameters, Adam's states, balancing buffers) in bytes on this rank after one step."""
    trainer = _build(rank, ranks, port, folder, arguments, recipe)
    try:
        trainer.train()
        parameters = [p.to_local().nbytes for m in trainer.model_parts for p in m.parameters()]
        states = [
            state.to_local().nbytes
            for optimizer in trainer.optimizers
            for values in optimizer.state.values()
            for name, state in values.items()
            if name != "step"
        ]
        engines = trainer.metrics_processor._engines()
        return sum(parameters), sum(states), sum(each.buffers.nbytes for each in engines)
    finally:
        _close(trainer)


def _expert_parallel(world: int) -> list[str]:
    batch = ["--training.local-batch-size", str(8 // world)]
    return ["--parallelism.expert-parallel-degree", str(world), *batch]


def _build(rank: int, world: int, port: int, folder: str, arguments: list[str], recipe: str):
    import torchtitan.trainer  # the fork server has it already

    from topoep_titan.titan.checks import check_job
    from topoep_titan.titan.job import complete, load_job, resolved_table
    from topoep_titan.titan.run_folder import open_run

    torchtitan.trainer.time.sleep = lambda seconds: None  # 2 s of courtesy at the end of a run
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    config = load_job(RECIPES / recipe, ["--dataloader.dataset-path", f"{folder}/data", *arguments])
    check_job(config, world)
    run = Path(folder) / f"run-{port}"
    run.mkdir(exist_ok=True)
    if rank == 0:
        open_run(run, resolved_table(config))
    return complete(config, run).build()


def _close(trainer) -> None:
    import torch.distributed as dist

    trainer.close()
    dist.destroy_process_group()
