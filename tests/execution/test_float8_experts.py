"""Float8 experts: torchao's rounding, the device's layout, and that replicas change nothing."""

import functools

import torch
from torch import Tensor
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

from tests.execution import layer_cases
from topoep_titan.execution import float8
from topoep_titan.execution.float8 import DTYPE, FLOAT8, float8_each, float8_outer
from topoep_titan.execution.layer import Engine

ROWS = [5, 0, 16, 21]  # of four experts; one has none, one needs no padding
A, B = 48, 32


def operands() -> tuple[Tensor, ...]:
    """Rows of very different sizes, weights stored as the layer stores them, output gradients."""
    generator = torch.Generator().manual_seed(0)
    size_M1 = torch.exp2(torch.arange(sum(ROWS)) % 23 - 11.0).unsqueeze(1)
    rows = torch.randn(sum(ROWS), A, generator=generator) * size_M1
    weight = torch.randn(len(ROWS), B, A, generator=generator)
    grads = torch.randn(sum(ROWS), B, generator=generator)
    return rows, weight.transpose(1, 2), grads


def dequantized(values: Tensor, dim: int) -> Tensor:
    """By torchao."""
    scale = tensor_to_scale(
        values, DTYPE, scaling_granularity=ScalingGranularity.AXISWISE, axiswise_dim=dim,
        round_scales_to_power_of_2=True,
    )  # fmt: skip
    return to_fp8_saturated(values * scale, DTYPE).float() / scale


def test_operands_are_rounded_as_torchao_rounds_them():
    rows, weight, grads = operands()
    out, outer = float8_each(rows, weight, ROWS), float8_outer(rows, grads, ROWS)
    ends = torch.tensor(ROWS).cumsum(0)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        group = slice(start, end)
        if end > start:
            expected = dequantized(rows[group], 1) @ dequantized(weight[expert], 0)
            torch.testing.assert_close(out[group], expected)
            expected = dequantized(rows[group], 0).T @ dequantized(grads[group], 0)
            torch.testing.assert_close(outer[expert], expected)
        else:
            assert not outer[expert].any()
        start = end
    assert not torch.allclose(out, torch.cat([r @ w for r, w in zip(rows.split(ROWS), weight)]))


def scaled_grouped_mm(left, right, left_scale, right_scale, *, offs, out_dtype, use_fast_accum):
    """What the device computes, by its documented layout; held to PyTorch's own checks."""
    meta = [t.to("meta") for t in (left, right, left_scale, right_scale)]
    meta[1] = meta[1].as_strided(right.shape, right.stride())
    shape = torch.ops.aten._scaled_grouped_mm(
        *meta, offs=offs.to("meta"), out_dtype=torch.bfloat16, use_fast_accum=use_fast_accum
    ).shape
    groups = list(zip([0, *offs.tolist()], offs.tolist()))
    left, right = left.float(), right.float()
    assert all((end - start) % 16 == 0 and end > start for start, end in groups)
    if right.ndim == 3:
        parts = [
            (left[start:end] * left_scale[start:end, None]) @ (right[x] * right_scale[x])
            for x, (start, end) in enumerate(groups)
        ]
        out = torch.cat(parts)
    else:
        left_scale, right_scale = (
            left_scale.view(len(groups), -1),
            right_scale.view(len(groups), -1),
        )
        out = torch.stack([
            (left[:, start:end] * left_scale[x][:, None]) @ (right[start:end] * right_scale[x])
            for x, (start, end) in enumerate(groups)
        ])  # fmt: skip
    assert out.shape == shape
    return out.to(out_dtype)


def test_the_device_gets_what_it_wants_and_gives_the_same(monkeypatch):
    rows, weight, grads = operands()
    emulated = float8_each(rows, weight, ROWS), float8_outer(rows, grads, ROWS)
    monkeypatch.setattr(float8, "emulated", lambda device: False)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm)
    torch.testing.assert_close(float8_each(rows, weight, ROWS), emulated[0])
    torch.testing.assert_close(float8_outer(rows, grads, ROWS), emulated[1])


def share(planner: str) -> list[Tensor]:
    """Output and gradients (x, scores, w1, w2, w3) of the ranks, one after the other."""
    case = ("alltoall", 2, planner, "hot", torch.float32)
    results = layer_cases.on_virtual_ranks(2, 1, layer_cases.run_share, *case)
    return [
        torch.cat(parts)
        for parts in zip(*([out, *(leaf.grad for leaf in leaves)] for leaves, out, *_ in results))
    ]


def test_replicas_multiply_as_mains_do(monkeypatch):
    exact = share("none")
    monkeypatch.setattr(layer_cases, "Engine", functools.partial(Engine, matmuls=FLOAT8))
    alone, balanced = share("none"), share("full slots")
    for i, (one, other, plain) in enumerate(zip(alone, balanced, exact)):
        # Weight gradients are scaled within the rows of an instance, so they depend on the plan.
        near = 0.1 if i > 2 else 1e-6
        assert (one - other).abs().max() <= near * one.abs().max()
        error = (one - plain).norm() / plain.norm()
        assert 0.01 < error < 0.1  # e4m3 keeps 3 bits of mantissa, and three matmuls follow
