"""What are the three models that everything is computed for?

    python -m recipes.model_shapes

TopoEP paper, Table 1, with what the simulator derives from it.
"""

import sys

from recipes.common import MODELS, TITLES, TOKENS, answer, model_named, value

# Experts, top-k, MoE layers, hidden, intermediate, PP, EP as printed in Table 1.
TABLE_1 = (
    (128, 8, 5, 2048, 768, 1, 32),
    (128, 8, 5, 4096, 1408, 2, 16),
    (160, 6, 4, 5120, 1536, 2, 16),
)
FIELDS = ("experts", "top_k", "moe_layers", "hidden", "moe_intermediate", "pipeline",
          "expert_parallel")  # fmt: skip


def main() -> int:
    return answer(
        question,
        figure="TopoEP Table 1",
        kind="computed",
        text="What are the three models that everything is computed for?",
        name="model_shapes",
    )


def question() -> dict:
    values, rows = [], []
    for name, published in zip(MODELS, TABLE_1):
        model = model_named(name)
        equal = sum(getattr(model, field) == number for field, number in zip(FIELDS, published))
        values.append(value(f"{TITLES[name]}: numbers as printed", len(FIELDS), equal, within=0))
        rows.append([
            TITLES[name], model.dims.token_bytes / 1024, model.dims.expert_bytes / 2**20,
            6 * model.hidden * model.moe_intermediate * model.top_k * TOKENS / 1e12,
            model.attention_flops(TOKENS) / 1e12, model.head_flops(TOKENS) / 1e12,
        ])  # fmt: skip
    return {
        "values": values,
        "conditions": "MoE layers of the paper's reduced models; the dense first layer of "
        "GLM-4.5-Air and DeepSeek-V2 is assumed to stay.",
        "tables": [
            {"caption": "Of one rank and microbatch of 4,096 tokens, forward.",
             "columns": ["model", "token, KiB", "expert, MiB", "routed experts, TFLOP a layer",
                         "rest of an MoE layer, TFLOP", "head, TFLOP"],
             "rows": rows}
        ],
        "curves": [],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
