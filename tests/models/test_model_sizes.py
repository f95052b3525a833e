"""Parameters of the published and the reduced models, counted on the meta device."""

import dataclasses

import pytest
import torch

from topoep_titan.models import MODELS


# Total and active parameters of transformers' classes built with the published config.json.
@pytest.mark.parametrize(
    ("base", "changes", "total", "active"),
    [
        ("qwen3_30b_a3b", {}, 30_532_122_624, 3_353_032_704),
        ("qwen3_30b_a3b", {"n_layers": 5}, 3_737_935_104, 906_779_904),
        ("glm4_5_air", {}, 106_852_245_504, 13_424_123_904),
        ("glm4_5_air", {"n_layers": 5}, 10_851_043_328, 2_546_321_408),
        ("glm4_5_air", {"n_layers": 5, "n_dense_layers": 0}, 12_948_981_760, None),
        ("deepseek_v2", {}, 235_741_434_880, 21_375_800_320),
        ("deepseek_v2", {"n_layers": 4}, 13_302_912_000, 2_402_964_480),
        ("deepseek_v2", {"n_layers": 4, "n_dense_layers": 0}, 16_937_047_040, None),
    ],
)
def test_parameter_counts(base, changes, total, active):
    fields = dataclasses.replace(MODELS[base](), **changes)
    with torch.device("meta"):
        model = fields.build_spec(base).model.build()
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    routed = sum(count for name, count in counts.items() if "routed_experts" in name)
    assert sum(counts.values()) == total
    if active is not None:
        share = routed * fields.top_k // fields.num_experts
        assert sum(counts.values()) - routed + share == active
