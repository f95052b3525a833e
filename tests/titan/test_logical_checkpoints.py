"""Checkpoints are in logical expert order whatever the placement, and a placed run resumes."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from tests.ranks import free_port
from tests.titan.training_cases import _build, _close
from topoep_titan.placement.refresh import position_of

pytestmark = pytest.mark.ranks

EXPERTS = "layers.1.moe.routed_experts.inner_experts.w2_EDF"
LAYOUT = [
    "--parallelism.expert-parallel-degree", "2", "--training.local-batch-size", "2",
    "--topoep.dispatcher", "dedup-node", "--training.steps", "12", "--checkpoint.enable",
    "--checkpoint.interval", "8",
]  # fmt: skip
EAGER = Path(__file__).parent / "slow_compute.toml"  # moves pay at every refresh
CORRELATED = [
    "--topoep.cluster", str(EAGER), "--placement.balance-weight", "1000",
    "--placement.strategy", "correlated", "--placement.refresh-steps", "4",
    "--placement.sample-tokens", "400",
]  # fmt: skip


def trained(rank: int, ranks: int, port: int, folder: str, arguments: list[str], layer: int = 1):
    """(step records, the layer's placement, its w2 and second moment in logical order, what
    refreshes moved) after a run on 4 ranks: EP 2 x FSDP 2."""
    trainer = _build(rank, ranks, port, folder, arguments, "tiny.toml")
    moved = {}
    if trainer.placement:
        move = trainer.placement.move
        trainer.placement.move = lambda main_E_of: (moved.update(main_E_of), move(main_E_of))
    try:
        trainer.train()
        module = trainer.model_parts[0].layers[str(layer)].moe.routed_experts
        engines = [
            layer.moe.routed_experts.engine for layer in trainer.model_parts[0].layers.values()
        ]
        assert len({id(engine.memory) for engine in engines}) == 1  # one set of buffers
        weight = module.inner_experts.w2_EDF
        (optimizer,) = trainer.optimizers
        tensors = [t.full_tensor() for t in (weight, optimizer.state[weight]["exp_avg_sq"])]
        logical = [tensor.detach()[position_of(module.main_E)].clone() for tensor in tensors]
        steps, _ = trainer.metrics_processor.step_log.read()
        return steps, module.main_E, logical, moved
    finally:
        _close(trainer)


def test_save_placed_resume_placed_and_read_logical(trainers, folder):
    port = free_port()
    run = folder / f"run-{port}"

    def train(*arguments: str):
        return trainers.run(trained, port, str(folder), [*LAYOUT, *arguments])[0]

    steps, main_E, logical, _ = train(*CORRELATED)
    saved = {"placement.rank0.1.main_E": torch.zeros_like(main_E)}
    dcp.load(saved, checkpoint_id=run / "checkpoint" / "step-8", no_dist=True)
    for placed in (main_E, *saved.values()):  # refreshes at 4 and 8 moved experts
        assert placed.tolist() != sorted(placed.tolist())

    # The file is logical: a reader that knows nothing of placements finds every expert at its id.
    read = {EXPERTS: torch.zeros_like(logical[0])}
    moment = f"optimizer.state.{EXPERTS}.exp_avg_sq"
    read[moment] = torch.zeros_like(logical[1])
    dcp.load(read, checkpoint_id=run / "checkpoint" / "step-12", no_dist=True)
    assert torch.equal(read[EXPERTS], logical[0])
    assert torch.equal(read[moment], logical[1])

    # Killed after step 8 and started again: placement and sample come back, losses bit for bit.
    shutil.rmtree(run / "checkpoint" / "step-12")
    (run / "result.json").unlink()
    resumed, again_E, *_ = train(*CORRELATED)
    assert [step["loss_hex"] for step in resumed] == [step["loss_hex"] for step in steps]
    assert torch.equal(again_E, main_E)

    # Loaded under none: a run with contiguous experts goes on from it with the same loss.
    (run / "result.json").unlink()
    shutil.rmtree(run / "checkpoint" / "step-12")
    source = run / "checkpoint" / "step-8"
    port = free_port()
    plain, plain_E, *_ = train("--checkpoint.initial-load-path", str(source))
    assert plain_E.tolist() == sorted(plain_E.tolist())
    assert [step["step"] for step in plain] == [9, 10, 11, 12]
    for ours, expected in zip(plain, steps[8:]):
        assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_the_last_save_in_hugging_face_format_names_logical_experts(trainers, folder):
    port = free_port()
    last = ["--checkpoint.last-save-in-hf", "--checkpoint.last-save-model-only"]
    settings = [*LAYOUT, *CORRELATED, "--training.steps", "6", *last]
    _, main_E, (w2_EDF, _), moved = trainers.run(trained, port, str(folder), settings, 0)[0]
    assert 0 in moved  # at step 4
    assert main_E.tolist() == sorted(main_E.tolist())  # and back for the file
    written = {}
    for file in (folder / f"run-{port}" / "checkpoint" / "step-6").glob("*.safetensors"):
        written |= load_file(file)
    for expert, w2_DF in enumerate(w2_EDF):
        name = f"model.layers.0.mlp.experts.{expert}.down_proj.weight"
        assert torch.equal(written[name], w2_DF)
