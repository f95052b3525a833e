"""A published ``config.json`` to our ``[model]`` table and back; nothing in it is ignored silently.

Every field that changes the mathematics is honoured or must have the one value that is supported;
fields that do not are listed by name; any other field is refused.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from topoep_titan.errors import InputError
from topoep_titan.models.deepseek_v2 import DeepSeekV2
from topoep_titan.models.family import ModelConfig, check_model
from topoep_titan.models.glm4_moe import Glm4Moe
from topoep_titan.models.qwen3 import Qwen3

FAMILIES: dict[str, type[ModelConfig]] = {
    family.MODEL_TYPE: family for family in (Qwen3, Glm4Moe, DeepSeekV2)
}
ARCHITECTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
}

# Our field: the published one.
_COMMON = {
    "n_layers": "num_hidden_layers",
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "moe_hidden_dim": "moe_intermediate_size",
    "top_k": "num_experts_per_tok",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
_DENSE_FIRST = {
    "n_dense_layers": "first_k_dense_replace",
    "dense_hidden_dim": "intermediate_size",
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "route_scale": "routed_scaling_factor",
    "num_groups": "n_group",
    "groups_kept": "topk_group",
}
FIELDS = {
    "qwen3_moe": _COMMON
    | {
        "num_experts": "num_experts",
        "n_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "norm_topk": "norm_topk_prob",
        "aux_coeff": "router_aux_loss_coef",
    },
    "glm4_moe": _COMMON
    | _DENSE_FIRST
    | {
        "n_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "qkv_bias": "attention_bias",
        "qk_norm": "use_qk_norm",
        "norm_topk": "norm_topk_prob",
    },
    "deepseek_v2": _COMMON
    | _DENSE_FIRST
    | {
        "q_lora_rank": "q_lora_rank",
        "kv_lora_rank": "kv_lora_rank",
        "qk_nope_head_dim": "qk_nope_head_dim",
        "qk_rope_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
        "topk_method": "topk_method",
        "aux_coeff": "aux_loss_alpha",
    },
}
# What a published field means where it is absent: the defaults of transformers' config classes.
# A dimension has no default.
ABSENT = {
    "qwen3_moe": {"norm_topk_prob": False, "router_aux_loss_coef": 0.001},
    "glm4_moe": {
        "attention_bias": False,
        "use_qk_norm": False,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "deepseek_v2": {
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "aux_loss_alpha": 0.001,
    },
}
# Fields that change the mathematics, and the values that are supported.
REQUIRED = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "tie_word_embeddings": (False,),
    "mlp_bias": (False,),
    "quantization_config": (None,),
}
REQUIRED_IN = {
    "qwen3_moe": {
        "attention_bias": (False,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
        "use_sliding_window": (False,),
    },
    "glm4_moe": {},
    "deepseek_v2": {
        "attention_bias": (False,),
        "norm_topk_prob": (False, None),  # transformers ignores it, the published code does not
        "scoring_func": ("softmax",),
        "moe_layer_freq": (1,),
        "seq_aux": (True,),
    },
}
WITHOUT_EFFECT = {
    "architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype",
    "eos_token_id", "ep_size", "id2label", "initializer_range", "is_encoder_decoder", "label2id",
    "max_window_layers", "name_or_path", "num_mtp_layers", "num_nextn_predict_layers",
    "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
    "pretraining_tp", "problem_type", "return_dict", "sliding_window", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip
# Dense width of Qwen3, which has no dense layer; key-value heads and width of latent attention.
WITHOUT_EFFECT_IN = {
    "qwen3_moe": {"intermediate_size"},
    "glm4_moe": set(),
    "deepseek_v2": {"num_key_value_heads", "head_dim", "qk_head_dim"},
}


# What a checkpoint does not fix: how it is trained on, and on how long sequences.
TRAINING_ONLY = {
    "balance", "aux_coeff", "device_coeff", "communication_coeff", "bias_step", "max_seq_len",
}  # fmt: skip


def read_hf_config(folder: Path) -> ModelConfig:
    """The model of a Hugging Face folder. Raises InputError for whatever is not supported."""
    path = folder / "config.json"
    try:
        table = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    try:
        return from_hf_table(table)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def mtp_layers(folder: Path) -> int:
    """Layers of multi-token prediction behind the model's own, which are not loaded."""
    table = json.loads((folder / "config.json").read_text())
    return table.get("num_nextn_predict_layers", table.get("num_mtp_layers")) or 0


def from_hf_table(table: dict[str, Any]) -> ModelConfig:
    table = dict(table)
    kind = table.pop("model_type", None)
    if kind not in FAMILIES:
        raise InputError(f"model_type is {kind!r}; supported: {', '.join(FAMILIES)}")
    for key, allowed in (REQUIRED | REQUIRED_IN[kind]).items():
        if key in table and table.pop(key) not in allowed:
            raise InputError(f"{key} is not supported but as {allowed[0]!r}")
    if kind == "qwen3_moe" and "num_local_experts" in table:
        table.setdefault("num_experts", table.pop("num_local_experts"))
    fields, rope = {}, _rope(table)
    for ours, theirs in FIELDS[kind].items():
        value = table.pop(theirs, None)
        fields[ours] = ABSENT[kind].get(theirs) if value is None else value
    if kind == "deepseek_v2":
        fields["q_lora_rank"] = fields["q_lora_rank"] or 0  # null: queries are not compressed
        fields["mscale"] = rope.pop("mscale_all_dim")
    elif fields["head_dim"] is None and fields["dim"] and fields["n_heads"]:
        fields["head_dim"] = fields["dim"] // fields["n_heads"]
    missing = [FIELDS[kind][ours] for ours, value in fields.items() if value is None]
    if missing:
        raise InputError(f"lacks {', '.join(missing)}")
    partial = rope.pop("partial_rotary_factor")
    if kind == "glm4_moe":
        fields["rotary_dim"] = int(fields["head_dim"] * (0.5 if partial is None else partial))
    elif partial not in (None, 1.0):
        raise InputError("partial_rotary_factor is not supported but as 1")
    if rope.pop("mscale_all_dim", 0):
        raise InputError(f"mscale_all_dim means nothing for {kind}")
    unknown = table.keys() - WITHOUT_EFFECT - WITHOUT_EFFECT_IN[kind]
    if unknown:
        raise InputError(f"unknown fields: {', '.join(sorted(unknown))}")
    if rope["yarn_factor"] > 1 and rope["yarn_original_len"] is None:
        rope["yarn_original_len"] = fields["max_seq_len"]
    rope = {ours: value for ours, value in rope.items() if value is not None}
    model = FAMILIES[kind](**fields, **rope)
    check_model(model)
    return model


def _rope(table: dict[str, Any]) -> dict[str, Any]:
    """Takes the rope's fields out of ``table``, in the old spelling or the new one."""
    theta = table.pop("rope_theta", None)
    scaling = table.pop("rope_scaling", None) or {}
    rope = dict(table.pop("rope_parameters", None) or scaling)
    partial = table.pop("partial_rotary_factor", None)
    old_kind = rope.pop("type", "default")
    kind = rope.pop("rope_type", old_kind)
    if kind not in ("default", "yarn"):
        raise InputError(f"rope_type is {kind!r}; supported: default, yarn")
    fields = {
        "rope_theta": float(rope.pop("rope_theta", theta) or 10_000.0),
        "partial_rotary_factor": rope.pop("partial_rotary_factor", partial),
        "yarn_factor": 1.0,
        "yarn_original_len": None,
        "mscale_all_dim": rope.pop("mscale_all_dim", None) or 0.0,
    }
    mscale, amplitude = rope.pop("mscale", None), rope.pop("attention_factor", None)
    if kind == "yarn":
        if not rope.get("factor"):
            raise InputError("YaRN's factor is missing")
        fields["yarn_factor"] = factor = float(rope.pop("factor"))
        fields["yarn_original_len"] = rope.pop("original_max_position_embeddings", None)
        fields["yarn_beta_fast"] = float(rope.pop("beta_fast", None) or 32.0)
        fields["yarn_beta_slow"] = float(rope.pop("beta_slow", None) or 1.0)
        if rope.pop("truncate", True) is not True:
            raise InputError("YaRN's truncate is not supported but as true")
        if amplitude is None and mscale and fields["mscale_all_dim"]:
            amplitude = _attention(factor, mscale) / _attention(factor, fields["mscale_all_dim"])
        fields["rope_amplitude"] = _attention(factor, 1.0) if amplitude is None else amplitude
    rope.pop("original_max_position_embeddings", None)  # without scaling it means nothing
    if rope:
        raise InputError(f"unknown rope fields: {', '.join(sorted(rope))}")
    return fields


def _attention(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def to_hf_table(model: ModelConfig) -> dict[str, Any]:
    """The config.json of ``model``, which ``from_hf_table`` reads back to the same."""
    kind = model.MODEL_TYPE
    table = {"architectures": [ARCHITECTURES[kind]], "model_type": kind}
    table |= {theirs: getattr(model, ours) for ours, theirs in FIELDS[kind].items()}
    table |= {"hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": model.rope_theta}
    if kind == "qwen3_moe":
        table["intermediate_size"] = model.moe_hidden_dim  # no layer has it
    elif kind == "glm4_moe":
        table["partial_rotary_factor"] = model.rotary_dim / model.head_dim
        table["num_nextn_predict_layers"] = 0
    else:
        table["q_lora_rank"] = model.q_lora_rank or None
        table["num_key_value_heads"] = model.n_heads
    if model.yarn_factor > 1:
        table["rope_scaling"] = {
            "type": "yarn",
            "factor": model.yarn_factor,
            "original_max_position_embeddings": model.yarn_original_len,
            "beta_fast": model.yarn_beta_fast,
            "beta_slow": model.yarn_beta_slow,
            "attention_factor": model.rope_amplitude,
        }
        if kind == "deepseek_v2":  # remote code of the published model reads both
            table["rope_scaling"] |= {"mscale": model.mscale, "mscale_all_dim": model.mscale}
    return table


def refuse_other_model(folder: Path, there: ModelConfig, here: ModelConfig) -> None:
    """Raise InputError with every field in which the folder's model is not the recipe's.

    What belongs to training may differ, and so may the length: a shorter rope is the same one.
    """
    if type(there) is not type(here):
        different = [f"model_type: {there.MODEL_TYPE}, {here.MODEL_TYPE}"]
    else:
        different = [
            f"{field.name}: {getattr(there, field.name)!r}, {getattr(here, field.name)!r}"
            for field in dataclasses.fields(there)
            if field.name not in TRAINING_ONLY
            and getattr(there, field.name) != getattr(here, field.name)
        ]
    if different:
        raise InputError(
            f"{folder} holds another model than the recipe builds (there, here): "
            f"{'; '.join(different)}"
        )
