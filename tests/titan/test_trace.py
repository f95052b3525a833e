"""The recorded routing is what the layers planned with, in the format of the simulator."""

import numpy as np
import pytest
import torch

from tests.ranks import free_port
from tests.titan.training_cases import train

pytestmark = pytest.mark.ranks
EP2 = ["--parallelism.expert-parallel-degree", "2", "--training.steps", "2"]


@pytest.mark.parametrize(
    ("world", "settings", "microbatches"),
    [
        (4, ["--training.local-batch-size", "2", "--topoep.ranks-per-node", "1"],
         [128]),  # two groups: the first one is kept
        (4, ["--training.local-batch-size", "4", "--parallelism.pipeline-parallel-degree", "2"],
         [64, 64, 64, 64]),  # each stage has one of the layers
    ],
)  # fmt: skip
def test_trace_holds_what_was_planned(trainers, folder, world, settings, microbatches):
    port = free_port()
    arguments = [*EP2, *settings, "--topoep.record-trace"]
    results = trainers.run(train, world, port, str(folder), arguments)
    (steps,) = [steps for steps in results if steps is not None]
    traces = sorted((folder / f"run-{port}" / "trace").iterdir())
    assert [trace.name for trace in traces] == ["step-000001.npz", "step-000002.npz"]
    for step, trace in zip(steps, traces):
        with np.load(trace) as arrays:
            ids, tokens = arrays["ids"], arrays["microbatch_tokens"].tolist()
            per_node = int(arrays["ranks_per_node"])
        assert (ids.dtype, ids.shape) == (np.int16, (2, 2, sum(microbatches), 2))
        assert tokens == microbatches
        assert per_node == (1 if "--topoep.ranks-per-node" in settings else 2)
        assert ids.min() >= 0
        assert ids.max() < 8
        assert (ids[..., 0] != ids[..., 1]).all()
        if "pipeline" not in str(settings) or step["step"] == 1:
            continue
        # One group a stage: the load that the layers reported, microbatch by microbatch.
        for layer, record in zip(ids, step["layers"]):
            ratios = []
            for part in np.split(layer, np.cumsum(tokens)[:-1], axis=1):
                load_R = torch.bincount(torch.from_numpy(part.astype(np.int64)).flatten() // 4)
                ratios.append((load_R.max() / load_R.double().mean()).item())
            assert record["max_over_mean_before"] == pytest.approx(np.mean(ratios))
