"""Hugging Face folders: the config.json read strictly, and one clear message for a damaged one."""

import json

import pytest
import torch

from tests.models.published_cases import CASES, shapes_of, token_ids, write_folder
from topoep_titan.errors import InputError
from topoep_titan.models import load_hf
from topoep_titan.models.hf_config import from_hf_table, to_hf_table


@pytest.mark.parametrize("case", CASES)
def test_config_survives_the_way_there_and_back(case):
    model = from_hf_table(CASES[case])
    assert from_hf_table(json.loads(json.dumps(to_hf_table(model)))) == model


def test_both_spellings_of_rope_are_one_model():
    old = CASES["deepseek_v2"]
    new = {key: old[key] for key in old if not key.startswith("rope_")}
    scaling = {key: value for key, value in old["rope_scaling"].items() if key != "type"}
    new["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 10000.0, **scaling}
    assert from_hf_table(new) == from_hf_table(old)
    glm = CASES["glm4_moe"]
    new = {key: glm[key] for key in glm if key not in ("rope_theta", "partial_rotary_factor")}
    new["rope_parameters"] = {
        "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5,
    }  # fmt: skip
    assert from_hf_table(new) == from_hf_table(glm)
    assert from_hf_table(glm).rotary_dim == 8


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("qwen3_moe", {"model_type": "llama"}, "model_type is 'llama'; supported: qwen3_moe"),
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act is not supported but as 'silu'"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers is not supported"),
        ("qwen3_moe", {"logit_softcap": 3}, "unknown fields: logit_softcap"),
        ("qwen3_moe", {"hidden_size": None}, "lacks hidden_size"),
        ("glm4_moe", {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type is 'linear'"),
        ("glm4_moe", {"first_k_dense_replace": 3}, r"n_dense_layers \(3\) must leave an MoE layer"),
        ("deepseek_v2", {"n_group": 3}, r"num_groups \(3\) must divide model.num_experts \(16\)"),
        ("deepseek_v2", {"topk_group": 1}, r"top_k \(3\) must be .* groups kept \(16 x 1 / 8\)"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is not supported"),
        ("deepseek_v2", {"quantization_config": {}}, "quantization_config is not supported"),
    ],
)
def test_what_is_not_supported_is_refused(case, changes, message):
    with pytest.raises(InputError, match=message):
        from_hf_table(CASES[case] | changes)


def folder(tmp_path, case="glm4_moe", table=None, **cast):
    return write_folder(tmp_path / case, table or CASES[case], shapes_of(case), **cast)


def test_missing_and_cut_off_files(tmp_path):
    path = folder(tmp_path)
    shard = path / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"00002-of-00002.safetensors is damaged or cut off"):
        load_hf(path)
    shard.unlink()
    with pytest.raises(InputError, match=r"lacks model-00002-of-00002.safetensors, which model"):
        load_hf(path)
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(InputError, match=r"lacks model.safetensors, and no model.safetensors.ind"):
        load_hf(path)
    (path / "config.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        load_hf(path)


def test_wrong_types_shapes_and_names(tmp_path):
    gate = "model.layers.1.mlp.gate.weight"
    with pytest.raises(InputError, match=f"{gate} is I8; supported: F32, BF16, F16"):
        load_hf(folder(tmp_path / "dtype", **{gate: torch.int8}))
    wide = CASES["glm4_moe"] | {"moe_intermediate_size": 25}
    with pytest.raises(InputError, match=r"has shape .* its config.json wants"):
        load_hf(folder(tmp_path / "shape", table=wide))
    deep = CASES["glm4_moe"] | {"num_hidden_layers": 4}
    with pytest.raises(InputError, match=r"unknown tensors: none; missing: model.layers.3"):
        load_hf(folder(tmp_path / "deep", table=deep))
    flat = CASES["glm4_moe"] | {"num_hidden_layers": 2}
    with pytest.raises(InputError, match=r"unknown tensors: model.layers.2"):
        load_hf(folder(tmp_path / "flat", table=flat))


def test_layers_of_multi_token_prediction_are_skipped(tmp_path):
    table = CASES["glm4_moe"] | {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    model = load_hf(folder(tmp_path, table=table))
    assert len(model.layers) == 2


def test_tokens_beyond_the_vocabulary_and_the_length(tmp_path):
    model = load_hf(folder(tmp_path))
    with pytest.raises(InputError, match="token ids 61 to 61 do not fit the vocabulary of 61"):
        model(torch.tensor([[61]]))
    with pytest.raises(InputError, match="129 tokens do not fit max_position_embeddings 128"):
        model(torch.zeros(1, 129, dtype=torch.int64))


def test_selection_bias_stays_float32_in_bfloat16(tmp_path):
    model = load_hf(folder(tmp_path), dtype=torch.bfloat16)
    assert model.layers["1"].moe.expert_bias_E.dtype == torch.float32
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model(token_ids()).isfinite().all()
