"""What a step's record says is what happened: which layer, how often, how fast, from which seed."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from data.shards import read_manifest
from tests.ranks import free_port
from tests.titan.training_cases import RECIPES, observe
from topoep_titan.titan import device

device.install()

from topoep_titan.execution.layer import LayerRecord
from topoep_titan.planning.plan import Plan
from topoep_titan.titan.dataloader import ShardDataLoader
from topoep_titan.titan.job import complete, load_job
from topoep_titan.titan.rank_load import BUSY, CELL, GAP, IDLE, LEVEL, executed, picture
from topoep_titan.titan.routing import SkewedGate, hashed_normals


@pytest.mark.ranks
def test_every_layer_is_recorded_once_under_its_own_name_and_in_true_time(trainers, folder):
    """Two ranks, two microbatches a step, full recomputation: each call counts once."""
    arguments = [
        "--parallelism.expert-parallel-degree", "2", "--training.local-batch-size", "2",
        "--training.steps", "1", "--topoep.planner", "none", "activation-checkpoint:full",
    ]  # fmt: skip
    first, second = trainers.run(observe, 2, free_port(), str(folder), arguments)[:2]
    (record,) = first[0] or second[0]
    assert first[2] == second[2] == {0: 2, 1: 2}
    assert [layer["layer"] for layer in record["layers"]] == [0, 1]
    for number, layer in enumerate(record["layers"]):
        # A rank has four of the eight experts. Means over microbatches, of four sequences each.
        ids = [
            torch.stack(parts) for parts in zip(*(r[1][number].chunk(2) for r in (first, second)))
        ]
        busiest = []
        for microbatch in ids:
            load_R = torch.bincount(microbatch.flatten() // 4, minlength=2).double()
            busiest.append(float(load_R.max() / load_R.mean()))
        assert layer["max_over_mean_before"] == pytest.approx(np.mean(busiest))
        load_R = torch.bincount(torch.cat(ids).flatten() // 4, minlength=2).double()
        assert layer["rank_load_before"] == layer["rank_load"]  # planner none
        assert layer["rank_load"] == pytest.approx((load_R / load_R.mean()).tolist(), abs=5e-4)
        load_E = torch.bincount(torch.cat(ids).flatten(), minlength=8).double()
        assert layer["expert_max_over_mean"] == pytest.approx(float(load_E.max() / load_E.mean()))
    assert (
        record["layers"][0]["expert_max_over_mean"] != record["layers"][1]["expert_max_over_mean"]
    )
    # The clock was read at the step's start and at its end: 0.25 s for 8 sequences of 64 tokens.
    assert record["seconds"] == 0.25
    assert record["tokens_per_second"] == 8 * 64 / 0.25


def test_load_of_ranks_before_and_under_a_plan():
    """Two ranks of one main and one slot: expert 0 has 6 of 8 assignments, 2 run on its replica."""
    plan = Plan(
        torch.tensor([0, -1, 1, 0], dtype=torch.int32),
        torch.tensor([[4, 0, 1, 0], [0, 0, 1, 2]], dtype=torch.int32),
    )
    record = LayerRecord(torch.tensor([[4, 1], [2, 1]]), plan, torch.tensor([0, 1]), 0.0, None)
    assert executed(record, 2).tolist() == [[6, 2], [4, 4]]
    image = picture([{"rank_load_before": [1.5, 0.5], "rank_load": [1.0, 1.0]}])
    assert image.shape == (CELL, 5 * CELL, 3)  # two ranks, a gap, two ranks
    before, idle, gap, after, _ = image[0, CELL // 2 :: CELL].tolist()
    assert (gap, after) == (list(GAP), list(LEVEL))
    assert before == [round((a + b) / 2) for a, b in zip(LEVEL, BUSY)]  # half way to 2, the most
    assert idle == [round((a + b) / 2) for a, b in zip(LEVEL, IDLE)]


def drawn(arguments: list[str]) -> dict[str, torch.Tensor]:
    """The model's parameters that are not constant, as training starts from them."""
    job = complete(load_job(RECIPES / "tiny.toml", arguments), Path("."))
    job.model_spec.model.update_from_config(config=job)
    model = job.model_spec.model.build()
    model.init_weights(buffer_device=torch.device("cpu"))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return {name: p for name, p in parameters.items() if p.std() > 0}


def test_each_parameter_has_its_own_numbers_and_they_follow_the_seed():
    zero, again, one = drawn([]), drawn([]), drawn(["--debug.seed", "1"])
    # The same draw would show in the first numbers, whatever the deviation.
    begins = torch.stack([p.flatten()[:16] / p.std() for p in zero.values()])
    assert len(begins) == 2 * 6 + 2  # qkv, o, gate, w1, w2, w3 of each layer; embedding, head
    assert torch.cdist(begins, begins).fill_diagonal_(9).min() > 1
    for name, parameter in zero.items():
        assert torch.equal(parameter, again[name])
        assert (
            abs(torch.corrcoef(torch.stack([parameter.flatten(), one[name].flatten()]))[0, 1]) < 0.2
        )


def test_validation_reads_the_validation_split(folder):
    job = complete(load_job(RECIPES / "tiny.toml", ["--dataloader.dataset-path", f"{folder}/data"]),
                   Path("."))  # fmt: skip
    settings = {"dp_world_size": 1, "dp_rank": 0, "tokenizer": None, "seq_len": 64}
    seen = {}
    for split, config in (("train", job.dataloader), ("validation", job.validator.dataloader)):
        loader = ShardDataLoader(dataclasses.replace(config, infinite=False),
                                 local_batch_size=1, **settings)  # fmt: skip
        seen[split] = {batch["input"].numpy().tobytes() for batch, _ in loader}
        shards = read_manifest(folder / "data").shards
        sequences = sum(shard.sequences for shard in shards if shard.split == split)
        assert len(seen[split]) > 0.9 * sequences  # all of it, but for repeated text
    assert len(seen["validation"] & seen["train"]) < 0.1 * len(seen["validation"])
    assert len(seen["validation"]) < len(seen["train"])


@pytest.mark.parametrize("seed", [0, 7])
def test_synthetic_routing_follows_the_seed(seed):
    arguments = ["--topoep.router-skew", "-4", "--debug.seed", str(seed)]
    job = complete(load_job(RECIPES / "tiny.toml", arguments), Path("."))
    for layer in job.model_spec.model.layers:
        gate = layer.moe.router.gate
        assert isinstance(gate, SkewedGate.Config)
        x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1))
        bias = gate.build()(x) - hashed_normals(x, 8)
        # The standard `skew` workload's draw (TopoEP paper, section 6.1: deviation of the bias).
        expected = np.random.default_rng(seed).normal(0, 4, 8).astype(np.float32)
        torch.testing.assert_close(bias, torch.from_numpy(expected).expand(2, 3, 8))
