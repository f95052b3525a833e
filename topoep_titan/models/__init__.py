"""Model families on torchtitan: each flavour by name, and how to build it.

``MODELS`` maps a recipe's ``base`` to a flavour. To add a family, write its folder and list its
flavours here. A reduced depth is ``[model] n_layers`` on the published flavour. ``load_hf`` builds
a model from a Hugging Face folder.
"""

from topoep_titan.titan import device

device.install()  # before anything else of torchtitan is imported

from topoep_titan.models.deepseek_v2 import DeepSeekV2
from topoep_titan.models.family import ModelConfig
from topoep_titan.models.glm4_moe import Glm4Moe
from topoep_titan.models.hf_model import load_hf, record_routing
from topoep_titan.models.qwen3 import Qwen3

MODELS = {
    "qwen3_debug": Qwen3.debug,
    "qwen3_30b_a3b": Qwen3.a3b_30b,
    "glm4_moe_debug": Glm4Moe.debug,
    "glm4_5_air": Glm4Moe.air_106b,
    "deepseek_v2_debug": DeepSeekV2.debug,
    "deepseek_v2": DeepSeekV2.published_236b,
}

__all__ = [
    "MODELS",
    "DeepSeekV2",
    "Glm4Moe",
    "ModelConfig",
    "Qwen3",
    "load_hf",
    "record_routing",
]
