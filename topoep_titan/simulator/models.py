"""The models of the paper as numbers: what their layers hold, and the FLOPs of the dense parts.

Widths are those of the published config.json files; ``MODELS`` names follow the training recipes.
The paper (Table 1) keeps MoE dimensions and reduces layers: 5, 5 and 4 MoE layers; that the dense
first layer of GLM-4.5-Air and DeepSeek-V2 stays in front of them is an assumption.

Letters: T tokens of a sequence.
"""

import dataclasses
from dataclasses import dataclass

from topoep_titan.cluster import ModelDims
from topoep_titan.errors import InputError


@dataclass(frozen=True)
class Model:
    name: str
    moe_layers: int
    dense_layers: int
    hidden: int
    moe_intermediate: int
    experts: int
    top_k: int
    attention_params: int  # of one layer
    score_width: int  # heads * (query-key width + value width)
    shared_params: int  # of one MoE layer's shared experts
    dense_ffn_params: int
    vocabulary: int
    pipeline: int  # stages in the paper
    expert_parallel: int  # ranks in the paper

    @property
    def dims(self) -> ModelDims:
        return ModelDims(self.hidden, self.moe_intermediate)

    def attention_flops(self, tokens: int) -> float:
        """Forward FLOPs of ``tokens`` in one layer outside the routed experts.

        Two for each parameter and token; causal scores and values see half of the sequence.
        """
        params = self.attention_params + self.shared_params + self.hidden * self.experts
        return tokens * (2.0 * params + tokens * self.score_width)

    def dense_layer_flops(self, tokens: int) -> float:
        params = self.attention_params + self.dense_ffn_params
        return tokens * (2.0 * params + tokens * self.score_width)

    def head_flops(self, tokens: int) -> float:
        return tokens * 2.0 * self.hidden * self.vocabulary


_QWEN3 = Model(
    name="qwen3_30b_a3b", moe_layers=48, dense_layers=0, hidden=2048, moe_intermediate=768,
    experts=128, top_k=8,
    attention_params=2048 * 128 * (32 + 4 + 4 + 32), score_width=32 * (128 + 128),
    shared_params=0, dense_ffn_params=0, vocabulary=151936, pipeline=1, expert_parallel=32,
)  # fmt: skip
_GLM = Model(
    name="glm4_5_air", moe_layers=45, dense_layers=1, hidden=4096, moe_intermediate=1408,
    experts=128, top_k=8,
    attention_params=4096 * 128 * (96 + 8 + 8 + 96), score_width=96 * (128 + 128),
    shared_params=3 * 4096 * 1408, dense_ffn_params=3 * 4096 * 10944, vocabulary=151552,
    pipeline=2, expert_parallel=16,
)  # fmt: skip
_DEEPSEEK = Model(
    name="deepseek_v2", moe_layers=59, dense_layers=1, hidden=5120, moe_intermediate=1536,
    experts=160, top_k=6,
    # q_a, q_b, kv_a, kv_b, o of multi-head latent attention
    attention_params=5120 * 1536 + 1536 * 128 * 192 + 5120 * 576 + 512 * 128 * 256 + 128**2 * 5120,
    score_width=128 * (192 + 128),
    shared_params=3 * 5120 * 2 * 1536, dense_ffn_params=3 * 5120 * 12288, vocabulary=102400,
    pipeline=2, expert_parallel=16,
)  # fmt: skip

_QWEN3_DEBUG = Model(
    name="qwen3_debug", moe_layers=4, dense_layers=0, hidden=128, moe_intermediate=96, experts=32,
    top_k=4, attention_params=128 * 32 * (4 + 2 + 2 + 4), score_width=4 * (32 + 32),
    shared_params=0, dense_ffn_params=0, vocabulary=8192, pipeline=1, expert_parallel=4,
)  # fmt: skip

MODELS = {
    model.name: model
    for model in (
        _QWEN3,
        _GLM,
        _DEEPSEEK,
        dataclasses.replace(_QWEN3, name="qwen3_30b_a3b_5l", moe_layers=5),
        dataclasses.replace(_GLM, name="glm4_5_air_5l", moe_layers=5),
        dataclasses.replace(_DEEPSEEK, name="deepseek_v2_4l", moe_layers=4),
        _QWEN3_DEBUG,  # replays what `make train` records on a CPU
    )
}


def model_named(name: str) -> Model:
    """Raises InputError that lists the known ones."""
    if name not in MODELS:
        raise InputError(f"unknown model {name!r}; choose one of: {', '.join(MODELS)}")
    return MODELS[name]
