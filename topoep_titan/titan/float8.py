"""``converters``: "float8" for the linears of attention and dense feed-forward (torchao), and
"float8_experts" for the routed experts (``execution/float8.py``).

Rows are scaled one by one (torchao's ``rowwise`` recipe: e4m3, scales that are powers of two), also
in backward. On a CPU it is emulated: values are rounded to float8 and multiplied as they are, so
that numerics can be studied. Router gates, embedding and head stay as they are. Experts multiply in
float8 wherever they run; their replicas travel in ``topoep.expert_dtype``, as their gradients do.
Neither has run on a GPU yet.
"""

import dataclasses
import importlib.util

import torch
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module

from topoep_titan.titan.device import on_cpu

CONVERTED = ("attention.", "feed_forward.", "shared_experts.")
ALIGNMENT = 16  # both dimensions of a float8 matmul must be multiples (float8 tensor cores)
CAPABILITY = (8, 9)  # CUDA compute capability with float8 matmuls
GROUPED_CAPABILITIES = (9, 10)  # major ones for which PyTorch has float8 grouped matmuls


def float8_missing() -> str | None:
    """What this machine lacks for float8 linears, emulated or not; None when it lacks nothing."""
    if importlib.util.find_spec("torchao") is None:
        return "the torchao package, which is not installed (pip install torchao==0.18.0)"
    if not on_cpu() and not has_float8_matmuls():
        return "a device with float8 matmuls (compute capability 8.9 or higher)"
    return None


def float8_experts_missing() -> str | None:
    """The same for float8 experts."""
    if not on_cpu() and not (
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in GROUPED_CAPABILITIES
    ):
        return "an NVIDIA device with float8 grouped matmuls (compute capability 9.x or 10.x)"
    return None


def has_float8_matmuls() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= CAPABILITY


def use_float8(model_config: Module.Config) -> list[str]:
    """Replace the linears in the tree; their names. Parameters keep names, shapes and dtype."""
    from torchao.float8 import Float8LinearConfig
    from torchtitan.components.quantization import Float8Linear

    recipe = Float8LinearConfig.from_recipe_name("rowwise")
    recipe = dataclasses.replace(recipe, emulate=on_cpu())
    converted = []
    for name, linear, parent, attribute in list(model_config.traverse(Linear.Config)):
        aligned = linear.in_features % ALIGNMENT == linear.out_features % ALIGNMENT == 0
        if aligned and any(part in name for part in CONVERTED):
            replacement = Float8Linear.Config(
                in_features=linear.in_features,
                out_features=linear.out_features,
                bias=linear.bias,
                param_init=linear.param_init,
                _torchao_config=recipe,
            )
            setattr(parent, attribute, replacement)
            converted.append(name)
    return converted
