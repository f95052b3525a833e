"""Float8 linears: rounded as the recipe says, where they are put; both converters train."""

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.ranks import free_port
from tests.titan.training_cases import RECIPES, train
from topoep_titan.errors import InputError
from topoep_titan.models import MODELS
from topoep_titan.titan.checks import check_job
from topoep_titan.titan.device import on_cpu
from topoep_titan.titan.float8 import float8_experts_missing, float8_missing, use_float8
from topoep_titan.titan.job import load_job

LARGEST_E4M3 = 448


def rounded(values: Tensor, dim: int) -> Tensor:
    """To e4m3 and back: scaled by the power of two that brings a row's largest value below 448."""
    largest = values.abs().amax(dim, keepdim=True).double()
    scale = torch.exp2(torch.floor(torch.log2(LARGEST_E4M3 / largest))).float()
    return (values * scale).to(torch.float8_e4m3fn).float() / scale


@pytest.mark.skipif(not on_cpu(), reason="exact only where it is emulated")
def test_a_linear_multiplies_rounded_values_forward_and_backward():
    config = MODELS["glm4_moe_debug"]().build_spec("").model
    assert "layers.0.feed_forward.w1" in use_float8(config)
    linear = config.layers[0].feed_forward.w1.build()
    torch.manual_seed(0)
    torch.nn.init.normal_(linear.weight)
    x = torch.randn(24, 128, requires_grad=True)
    y = linear(x)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    weight = linear.weight.detach()
    assert torch.equal(y, rounded(x.detach(), 1) @ rounded(weight, 1).T)
    # Each product is scaled along the dimension that it sums over.
    torch.testing.assert_close(x.grad, rounded(gradient, 1) @ rounded(weight, 0))
    expected = rounded(gradient, 0).T @ rounded(x.detach(), 0)
    torch.testing.assert_close(linear.weight.grad, expected)
    assert not torch.allclose(y, x @ weight.T)


def test_what_is_converted():
    config = MODELS["deepseek_v2"]().build_spec("").model
    names = use_float8(config)
    latent = ["wq_a", "wq_b", "wkv_a", "wkv_b", "wo"]
    dense, moe = (
        f"layers.{i}.{part}.w" for i, part in ((0, "feed_forward"), (1, "moe.shared_experts"))
    )
    for layer, ffn in ((0, dense), (1, moe)):
        wanted = [f"layers.{layer}.attention.{name}" for name in latent]
        wanted += [f"{ffn}{i}" for i in (1, 2, 3)]
        assert sorted(n for n in names if n.startswith(f"layers.{layer}.")) == sorted(wanted)
    assert len(names) == 60 * 8  # nothing of embedding, head or routers
    narrow = dataclasses.replace(MODELS["glm4_moe_debug"](), dense_hidden_dim=100)
    names = use_float8(narrow.build_spec("").model)
    assert not any("feed_forward" in name for name in names)  # 100 is no multiple of 16


@pytest.mark.ranks
def test_training_in_float8_is_near_the_one_in_fp32(trainers, folder):
    settings = ["--parallelism.expert-parallel-degree", "2", "--training.local-batch-size", "4"]
    settings += ["--topoep.planner", "topoep", "--training.steps", "10"]
    losses = []
    for more in ([], ["--converters", "float8"], ["--converters", "float8_experts"]):
        arguments = ["tiny_glm4_moe.toml"]
        results = trainers.run(train, 2, free_port(), str(folder), settings + more, *arguments)
        losses.append([step["loss"] for step in next(filter(None, results))])
    plain, *both = losses
    for rough in both:
        assert plain != rough
        assert rough[-1] < rough[0] - 0.3
        for one, other in zip(plain, rough):  # e4m3 keeps 3 bits of mantissa
            assert other == pytest.approx(one, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["float8", "--parallelism.tensor-parallel-degree", "2"],
         r"each tensor-parallel rank \(2\) would scale its own slice"),
        (["float8_experts", "--parallelism.tensor-parallel-degree", "2"],
         "set parallelism.expert_parallel_degree to at least 2"),
        (["float8_experts", "--topoep.expert-dtype", "float64"],
         "needs topoep.expert_dtype = bfloat16 or float32, not float64"),
        (["float8_experts", "--model.moe-hidden-dim", "40"], "model.moe_hidden_dim is 40"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused(arguments, message):
    config = load_job(RECIPES / "tiny.toml", ["--converters", *arguments])
    ranks = config.parallelism.tensor_parallel_degree
    with pytest.raises(InputError, match=message):
        check_job(config, ranks, with_data=False)


@pytest.mark.parametrize(
    ("capability", "linears", "experts"),
    [((8, 0), False, False), ((8, 9), True, False), ((9, 0), True, True), ((12, 0), True, False)],
)
def test_which_devices_have_which_matmuls(monkeypatch, capability, linears, experts):
    """8.9 (Ada) has float8 tensor cores; PyTorch's grouped float8 kernels are for 9.x and 10.x."""
    monkeypatch.setattr("topoep_titan.titan.float8.on_cpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert (float8_missing() is None, float8_experts_missing() is None) == (linears, experts)


def test_without_torchao_it_is_refused(monkeypatch):
    monkeypatch.setattr("topoep_titan.titan.float8.importlib.util.find_spec", lambda name: None)
    config = dataclasses.replace(load_job(RECIPES / "tiny.toml"), converters=["float8"])
    with pytest.raises(InputError, match="needs the torchao package"):
        check_job(config, 1, with_data=False)
