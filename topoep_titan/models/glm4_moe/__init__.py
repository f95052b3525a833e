"""GLM-4.5 MoE on torchtitan's Qwen3 blocks: partial rotary, biased q/k/v, sigmoid router.

The multi-token-prediction layer of the published checkpoint is not part of the model here (nor in
transformers'); loading skips its tensors.
"""

from dataclasses import dataclass
from typing import ClassVar

from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec

from topoep_titan.models.family import (
    ModelConfig,
    feed_forward,
    grouped_query_attention,
    mixture_of_experts,
    norm,
)
from topoep_titan.models.hf_names import hf_adapter
from topoep_titan.models.rope import HalfSplitRoPE
from topoep_titan.titan.device import gloo_safe


@dataclass(kw_only=True, slots=True)
class Glm4Moe(ModelConfig):
    """The ``[model]`` table. The first layers are dense, the others MoE with shared experts."""

    MODEL_TYPE: ClassVar[str] = "glm4_moe"

    n_dense_layers: int = 1
    n_kv_heads: int
    head_dim: int
    rotary_dim: int
    """Of head_dim: how many dimensions are rotated."""
    dense_hidden_dim: int
    num_shared_experts: int = 1
    qkv_bias: bool = True
    qk_norm: bool = False
    """True in GLM-4.5 (355B), false in Air."""
    norm_topk: bool = True
    route_scale: float = 1.0
    num_groups: int = 1
    groups_kept: int = 1
    rope_theta: float = 1e6
    norm_eps: float = 1e-5
    aux_coeff: float = 1e-4
    """Of the sequence-wise loss (GLM-4.5 report, section 2.4)."""

    @classmethod
    def debug(cls) -> "Glm4Moe":
        """Small enough for two CPU cores, shaped like the real one (q dim twice the model's)."""
        return cls(
            n_layers=4,
            dim=128,
            n_heads=8,
            n_kv_heads=2,
            head_dim=32,
            rotary_dim=16,
            dense_hidden_dim=384,
            moe_hidden_dim=96,
            num_experts=32,
            top_k=4,
            vocab_size=8192,
            max_seq_len=1024,
        )

    @classmethod
    def air_106b(cls) -> "Glm4Moe":
        """GLM-4.5-Air as published (config.json of the model), without its MTP layer."""
        return cls(
            n_layers=46,
            dim=4096,
            n_heads=96,
            n_kv_heads=8,
            head_dim=128,
            rotary_dim=64,
            dense_hidden_dim=10944,
            moe_hidden_dim=1408,
            num_experts=128,
            top_k=8,
            vocab_size=151552,
            max_seq_len=131072,
        )

    @property
    def has_selection_bias(self) -> bool:
        return True  # part of the published model, moved in training or not

    def build_spec(self, flavor: str) -> ModelSpec:
        layers = [self._layer(dense=i < self.n_dense_layers) for i in range(self.n_layers)]
        return ModelSpec(
            name=self.MODEL_TYPE,
            flavor=flavor,
            model=Qwen3Model.Config(**self.decoder_parts(), layers=layers),
            parallelize_fn=gloo_safe(parallelize_qwen3),
            pipelining_fn=pipeline_llm,
            post_optimizer_build_fn=self.bias_hook(),
            state_dict_adapter=hf_adapter(self),
        )

    def _layer(self, *, dense: bool) -> Qwen3TransformerBlock.Config:
        return Qwen3TransformerBlock.Config(
            attention_norm=norm(self.dim, self.norm_eps),
            ffn_norm=norm(self.dim, self.norm_eps),
            attention=grouped_query_attention(
                self,
                n_kv_heads=self.n_kv_heads,
                head_dim=self.head_dim,
                rope=HalfSplitRoPE.Config(**self.rope_fields(self.rotary_dim)),
                qkv_bias=self.qkv_bias,
                qk_norm=self.qk_norm,
            ),
            feed_forward=feed_forward(self, self.dense_hidden_dim) if dense else None,
            moe=None
            if dense
            else mixture_of_experts(
                self,
                score_func="sigmoid",
                route_norm=self.norm_topk,
                route_scale=self.route_scale,
                num_groups=self.num_groups,
                groups_kept=self.groups_kept,
                group_score="top2_sum",
                aux_scope="sequence",
                aux_scale=self.aux_coeff,
                shared_hidden_dim=self.moe_hidden_dim * self.num_shared_experts,
            ),
        )
