"""Published tensor names and ours: one table a family, and what follows from it.

The published checkpoints keep one matrix an expert; here an expert matrix of all experts is one
parameter (E, rows, columns). ``{}`` stands for the layer, the second one for the expert.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from topoep_titan.models.family import ModelConfig

_L, _P = "model.layers.{}.", "layers.{}."
_SHARED = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
    _L + "input_layernorm.weight": _P + "attention_norm.weight",
    _L + "post_attention_layernorm.weight": _P + "ffn_norm.weight",
    _L + "self_attn.o_proj.weight": _P + "attention.wo.weight",
    _L + "mlp.gate.weight": _P + "moe.router.gate.weight",
    _L + "mlp.experts.{}.gate_proj.weight": _P + "moe.routed_experts.inner_experts.w1_EFD",
    _L + "mlp.experts.{}.up_proj.weight": _P + "moe.routed_experts.inner_experts.w3_EFD",
    _L + "mlp.experts.{}.down_proj.weight": _P + "moe.routed_experts.inner_experts.w2_EDF",
}
_DENSE_AND_SHARED_EXPERTS = {
    _L + f"mlp.{theirs}{name}_proj.weight": _P + f"{ours}.{w}.weight"
    for theirs, ours in (("", "feed_forward"), ("shared_experts.", "moe.shared_experts"))
    for name, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
_GROUPED_QUERY = {
    _L + f"self_attn.{x}_proj.{kind}": _P + f"attention.qkv_linear.w{x}.{kind}"
    for x in "qkv"
    for kind in ("weight", "bias")
} | {_L + f"self_attn.{x}_norm.weight": _P + f"attention.{x}_norm.weight" for x in "qk"}
_LATENT = {
    _L + f"self_attn.{theirs}.weight": _P + f"attention.{ours}.weight"
    for theirs, ours in (
        ("q_proj", "wq"),
        ("q_a_proj", "wq_a"),
        ("q_a_layernorm", "q_norm"),
        ("q_b_proj", "wq_b"),
        ("kv_a_proj_with_mqa", "wkv_a"),
        ("kv_a_layernorm", "kv_norm"),
        ("kv_b_proj", "wkv_b"),
    )
}
NAMES = {
    "qwen3_moe": _SHARED | _GROUPED_QUERY,
    "glm4_moe": _SHARED
    | _DENSE_AND_SHARED_EXPERTS
    | _GROUPED_QUERY
    | {_L + "mlp.gate.e_score_correction_bias": _P + "moe.expert_bias_E"},
    "deepseek_v2": _SHARED | _DENSE_AND_SHARED_EXPERTS | _LATENT,
}


class HFAdapter(Qwen3StateDictAdapter):
    """torchtitan's conversion of a (sharded) state dict, driven by the family's table."""

    def __init__(self, names: dict[str, str], model_config: Any, hf_assets_path: str | None):
        super().__init__(model_config, hf_assets_path)
        self.from_hf_map = names

    def _validate_hf_rope_config(self, expected_rope_cls: type) -> None:
        """Each family builds the one rope that its checkpoints were trained with."""


def hf_adapter(model: ModelConfig):
    return partial(HFAdapter, NAMES[model.MODEL_TYPE])


@dataclass(frozen=True)
class Place:
    """Where a published tensor lives here."""

    name: str  # in our state dict
    expert: int | None  # index in dimension 0 of a parameter of all experts
    shape: tuple[int, ...]  # of the published tensor
    dtype: torch.dtype  # of ours; float32 for the selection bias, whatever the rest is


def places(model: ModelConfig) -> dict[str, Place]:
    """Every tensor of the published checkpoint of ``model``, by its published name.

    A selection bias that the published format cannot hold has no place.
    """
    with torch.device("meta"):
        parameters = model.build_spec("").model.build().state_dict()
    ours_to_theirs = {ours: theirs for theirs, ours in NAMES[model.MODEL_TYPE].items()}
    found = {}
    for name, tensor in parameters.items():
        head, layer, rest = _split(name)
        template = ours_to_theirs.get(f"{head}{{}}{rest}" if layer is not None else name)
        if template is None:
            continue
        if "experts.{}" not in template:
            found[template.format(layer)] = Place(name, None, tuple(tensor.shape), tensor.dtype)
            continue
        for expert in range(tensor.shape[0]):
            place = Place(name, expert, tuple(tensor.shape[1:]), tensor.dtype)
            found[template.format(layer, expert)] = place
    return found


def _split(name: str) -> tuple[str, str | None, str]:
    """("layers.", "3", ".attention.wo.weight"); the layer is None outside the layers."""
    if not name.startswith("layers."):
        return name, None, ""
    _, layer, rest = name.split(".", 2)
    return "layers.", layer, f".{rest}"
