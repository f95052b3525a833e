"""The distributed layer equals the one-process float64 oracle, whatever the plan."""

import pytest
import torch

from tests.execution.layer_cases import layer_against_oracle, layer_bits

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("routing", ["hot", "one expert"])
@pytest.mark.parametrize("planner", ["none", "topoep", "full slots"])
def test_layer_equals_the_oracle(four_ranks, planner, routing):
    for errors in four_ranks.run(layer_against_oracle, planner, routing):
        replicas = errors.pop("replicas")
        assert (replicas > 0) == (planner != "none")
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_repeats_bit_for_bit(four_ranks, dtype):
    first, second = (four_ranks.run(layer_bits, dtype) for _ in range(2))
    assert first == second
