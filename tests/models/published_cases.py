"""Tiny models in the published format: config.json, and weights drawn from each tensor's name.

``reference/<case>.npz`` holds what transformers computes from exactly these folders (see
``make_reference.py``), so the tests need neither transformers nor a network.
"""

import json
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

REFERENCE = Path(__file__).with_name("reference")

_COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_QWEN = _COMMON | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "intermediate_size": 40,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_theta": 1e6,
    "rope_scaling": None,
}
_GLM = _COMMON | {
    "model_type": "glm4_moe",
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "intermediate_size": 40,
    "attention_bias": True,
    "use_qk_norm": False,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 0,
}
_DEEPSEEK = _COMMON | {
    "model_type": "deepseek_v2",
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "intermediate_size": 40,
    "topk_method": "group_limited_greedy",
    "n_group": 8,
    "topk_group": 3,
    "norm_topk_prob": False,
    "routed_scaling_factor": 16.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
CASES = {
    "qwen3_moe": _QWEN,
    # New spelling of rope, YaRN with its attention factor, scores not renormalised.
    "qwen3_moe_yarn": {key: _QWEN[key] for key in _QWEN if not key.startswith("rope_")}
    | {
        "norm_topk_prob": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "glm4_moe": _GLM,
    # As the 355B: QK norm, scale 2.5; and groups, which no published size uses.
    "glm4_moe_groups": _GLM
    | {"use_qk_norm": True, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2},
    "deepseek_v2": _DEEPSEEK,
    # Shorter than the original length (YaRN stays on), as V2-Lite: no q latent, no groups; mscale
    # and mscale_all_dim differ, so cosine and sine are scaled too; another eps than the latents'.
    "deepseek_v2_lite": _DEEPSEEK
    | {
        "q_lora_rank": None,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "rope_scaling": _DEEPSEEK["rope_scaling"]
        | {"original_max_position_embeddings": 64, "mscale": 1.0},
    },
}


def write_folder(folder: Path, table: dict, shapes: dict[str, tuple[int, ...]], **cast) -> Path:
    """A Hugging Face folder of two safetensors files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(table))
    tensors = {name: weight(name, shape) for name, shape in shapes.items()}
    tensors |= {name: tensors[name].to(dtype) for name, dtype in cast.items()}
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2]}
    files["model-00002-of-00002.safetensors"] = names[1::2]
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, held in files.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """float32; large enough that attention, norms, biases and routing all matter."""
    normal = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if "norm" in name:
        drawn = 1 + 0.3 * normal
    elif name.endswith(("bias", "gate.weight")):
        drawn = 0.3 * normal
    else:
        drawn = 0.2 * normal
    return torch.from_numpy(drawn.astype(np.float32))


def token_ids() -> torch.Tensor:
    """(1, 48): longer than the original length of `deepseek_v2`, shorter than `_lite`'s."""
    return torch.from_numpy(np.random.default_rng(0).integers(0, 61, (1, 48)))


def shapes_of(case: str) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in reference(case)["shapes"].items()}


def reference(case: str) -> dict:
    """logits (1, 48, V), loss, experts and weights (layers, 48, K) of the MoE layers, gradient
    norms by published name, shapes by published name."""
    with np.load(REFERENCE / f"{case}.npz") as arrays:
        texts = ("shapes", "gradient_norms", "versions")
        return {
            key: json.loads(str(arrays[key])) if key in texts else torch.from_numpy(arrays[key])
            for key in arrays.files
        }
