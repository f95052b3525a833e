"""DeepSeek-V2 on torchtitan's DeepSeek-V3 blocks: V2's router, norms and softmax scale."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.deepseek_v3 import DeepSeekV3Model, parallelize_deepseekv3
from torchtitan.models.deepseek_v3.model import Attention, DeepSeekV3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec

from topoep_titan.models.family import (
    ModelConfig,
    feed_forward,
    inner_attention,
    linear,
    mixture_of_experts,
    norm,
)
from topoep_titan.models.hf_names import hf_adapter
from topoep_titan.models.rope import InterleavedRoPE
from topoep_titan.titan.device import gloo_safe

LATENT_NORM_EPS = 1e-6  # of the norms on the q and kv latents; the published code fixes it


@dataclass(kw_only=True, slots=True)
class DeepSeekV2(ModelConfig):
    """The ``[model]`` table. The first layers are dense, the others MoE with shared experts."""

    MODEL_TYPE: ClassVar[str] = "deepseek_v2"

    n_dense_layers: int = 1
    q_lora_rank: int
    """0: queries are not compressed (DeepSeek-V2-Lite)."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    dense_hidden_dim: int
    num_shared_experts: int = 2
    topk_method: Literal["greedy", "group_limited_greedy"] = "group_limited_greedy"
    num_groups: int
    groups_kept: int
    route_scale: float = 16.0
    mscale: float = 0.707
    """YaRN's mscale_all_dim, which enters the softmax scale; 0 leaves that alone."""
    rope_theta: float = 1e4
    norm_eps: float = 1e-6
    yarn_factor: float = 40.0
    aux_coeff: float = 3e-3
    """Of the expert-level, sequence-wise loss (DeepSeek-V2, section 3.1.2; the published
    config.json says 0.001)."""
    device_coeff: float = 0.05
    """Of the device-level loss (the same section); a device is one of ``num_groups``, whatever
    ranks its experts are on. Without groups ("greedy") there is none."""
    communication_coeff: float = 0.02
    """Of the communication loss (the same section); as above."""

    @classmethod
    def debug(cls) -> "DeepSeekV2":
        """Small enough for two CPU cores, shaped like the real one (MLA, 8 groups of which 3)."""
        return cls(
            n_layers=4,
            dim=128,
            n_heads=4,
            q_lora_rank=48,
            kv_lora_rank=32,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
            dense_hidden_dim=384,
            moe_hidden_dim=96,
            num_experts=32,
            top_k=4,
            num_groups=8,
            groups_kept=3,
            vocab_size=8192,
            max_seq_len=1024,
        )

    @classmethod
    def published_236b(cls) -> "DeepSeekV2":
        """DeepSeek-V2 as published (config.json of the model)."""
        return cls(
            n_layers=60,
            dim=5120,
            n_heads=128,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            dense_hidden_dim=12288,
            moe_hidden_dim=1536,
            num_experts=160,
            top_k=6,
            num_groups=8,
            groups_kept=3,
            vocab_size=102400,
            max_seq_len=163840,
        )

    def build_spec(self, flavor: str) -> ModelSpec:
        layers = [self._layer(dense=i < self.n_dense_layers) for i in range(self.n_layers)]
        return ModelSpec(
            name=self.MODEL_TYPE,
            flavor=flavor,
            model=DeepSeekV3Model.Config(**self.decoder_parts(), layers=layers),
            parallelize_fn=gloo_safe(parallelize_deepseekv3),
            pipelining_fn=pipeline_llm,
            post_optimizer_build_fn=self.bias_hook(),
            state_dict_adapter=hf_adapter(self),
        )

    def _layer(self, *, dense: bool) -> DeepSeekV3TransformerBlock.Config:
        grouped = self.topk_method == "group_limited_greedy"
        return DeepSeekV3TransformerBlock.Config(
            attention_norm=norm(self.dim, self.norm_eps),
            ffn_norm=norm(self.dim, self.norm_eps),
            attention=self._attention(),
            feed_forward=feed_forward(self, self.dense_hidden_dim) if dense else None,
            moe=None
            if dense
            else mixture_of_experts(
                self,
                score_func="softmax",
                route_norm=False,
                route_scale=self.route_scale,
                num_groups=self.num_groups if grouped else 1,
                groups_kept=self.groups_kept if grouped else 1,
                group_score="max",
                aux_scope="sequence",
                aux_scale=self.aux_coeff,
                device_scale=self.device_coeff,
                communication_scale=self.communication_coeff,
                shared_hidden_dim=self.moe_hidden_dim * self.num_shared_experts,
            ),
        )

    def _attention(self) -> Attention.Config:
        query_dim = self.n_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        value_dim = self.n_heads * self.v_head_dim
        compressed = self.q_lora_rank > 0
        return Attention.Config(
            dim=self.dim,
            n_heads=self.n_heads,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            wq=None if compressed else linear(self.dim, query_dim),
            wq_a=linear(self.dim, self.q_lora_rank) if compressed else None,
            wq_b=linear(self.q_lora_rank, query_dim) if compressed else None,
            q_norm=norm(max(self.q_lora_rank, 1), LATENT_NORM_EPS),  # unused where not compressed
            wkv_a=linear(self.dim, self.kv_lora_rank + self.qk_rope_head_dim),
            kv_norm=norm(self.kv_lora_rank, LATENT_NORM_EPS),
            wkv_b=linear(
                self.kv_lora_rank, self.n_heads * (self.qk_nope_head_dim + self.v_head_dim)
            ),
            wo=linear(value_dim, self.dim, self.residual_std),
            inner_attention=inner_attention(),
            rope=InterleavedRoPE.Config(**self.rope_fields(self.qk_rope_head_dim)),
            mscale=self.mscale,
        )
