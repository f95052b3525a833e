"""Model families on torchtitan: each flavour by name, and how to build it.

``MODELS`` maps a recipe's ``base`` to a flavour. To add a family, write its folder and list its
flavours here.
"""

from topoep_titan.models.qwen3 import Qwen3

MODELS = {
    "qwen3_debug": Qwen3.debug,
    "qwen3_30b_a3b": Qwen3.a3b_30b,
}
