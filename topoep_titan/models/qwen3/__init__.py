"""Qwen3 MoE on torchtitan's own Qwen3 model: flavours as plain numbers, built from its parts."""

from dataclasses import dataclass
from typing import ClassVar

from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec

from topoep_titan.models.family import (
    ModelConfig,
    grouped_query_attention,
    mixture_of_experts,
    norm,
)
from topoep_titan.models.hf_names import hf_adapter
from topoep_titan.models.rope import HalfSplitRoPE
from topoep_titan.titan.device import gloo_safe


@dataclass(kw_only=True, slots=True)
class Qwen3(ModelConfig):
    """The ``[model]`` table. Every layer is an MoE layer; embedding and head are not tied."""

    MODEL_TYPE: ClassVar[str] = "qwen3_moe"

    n_kv_heads: int
    head_dim: int
    norm_topk: bool = True
    """Renormalise the chosen experts' scores to one."""
    rope_theta: float = 1e6
    norm_eps: float = 1e-6

    @classmethod
    def debug(cls) -> "Qwen3":
        """Small enough for two CPU cores, shaped like the real one (QK norm, softmax router)."""
        return cls(
            n_layers=4,
            dim=128,
            n_heads=4,
            n_kv_heads=2,
            head_dim=32,
            moe_hidden_dim=96,
            num_experts=32,
            top_k=4,
            vocab_size=8192,
            max_seq_len=1024,
        )

    @classmethod
    def a3b_30b(cls) -> "Qwen3":
        """Qwen3-30B-A3B as published (config.json of the model)."""
        return cls(
            n_layers=48,
            dim=2048,
            n_heads=32,
            n_kv_heads=4,
            head_dim=128,
            moe_hidden_dim=768,
            num_experts=128,
            top_k=8,
            vocab_size=151936,
            max_seq_len=40960,
        )

    def build_spec(self, flavor: str) -> ModelSpec:
        layers = [self._layer() for _ in range(self.n_layers)]
        return ModelSpec(
            name=self.MODEL_TYPE,
            flavor=flavor,
            model=Qwen3Model.Config(**self.decoder_parts(), layers=layers),
            parallelize_fn=gloo_safe(parallelize_qwen3),
            pipelining_fn=pipeline_llm,
            post_optimizer_build_fn=self.bias_hook(),
            state_dict_adapter=hf_adapter(self),
        )

    def _layer(self) -> Qwen3TransformerBlock.Config:
        return Qwen3TransformerBlock.Config(
            attention_norm=norm(self.dim, self.norm_eps),
            ffn_norm=norm(self.dim, self.norm_eps),
            attention=grouped_query_attention(
                self,
                n_kv_heads=self.n_kv_heads,
                head_dim=self.head_dim,
                rope=HalfSplitRoPE.Config(**self.rope_fields(self.head_dim)),
                qkv_bias=False,
                qk_norm=True,
            ),
            moe=mixture_of_experts(
                self,
                score_func="softmax",
                route_norm=self.norm_topk,
                # The published loss (transformers' load_balancing_loss_func) counts K assignments
                # a token and is a mean over layers; here the statistics are each layer's own.
                aux_scope="batch",
                aux_scale=self.aux_coeff * self.top_k / self.n_layers,
            ),
        )
