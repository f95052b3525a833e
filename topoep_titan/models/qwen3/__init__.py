"""Qwen3 MoE on torchtitan's own Qwen3 model: flavours as plain numbers, built from its parts."""

from dataclasses import dataclass
from functools import partial

from torch import nn
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.config_utils import (
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from topoep_titan.titan.device import gloo_safe, on_cpu


@dataclass(kw_only=True, slots=True)
class Qwen3:
    """The ``[model]`` table. Every layer is an MoE layer; embedding and head are not tied."""

    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    moe_hidden_dim: int
    """Width F of one expert."""
    num_experts: int
    top_k: int
    vocab_size: int
    max_seq_len: int
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
        normal = partial(nn.init.normal_, std=0.02)
        linear = {"weight": normal, "bias": nn.init.zeros_}
        config = Qwen3Model.Config(
            dim=self.dim,
            vocab_size=self.vocab_size,
            norm=self._norm(self.dim),
            tok_embeddings=Embedding.Config(
                num_embeddings=self.vocab_size,
                embedding_dim=self.dim,
                param_init={"weight": normal},
            ),
            lm_head=Linear.Config(
                in_features=self.dim, out_features=self.vocab_size, param_init=linear
            ),
            layers=[self._layer() for _ in range(self.n_layers)],
        )
        return ModelSpec(
            name="qwen3",
            flavor=flavor,
            model=config,
            parallelize_fn=gloo_safe(parallelize_qwen3),
            pipelining_fn=pipeline_llm,
            post_optimizer_build_fn=None,  # no selection bias in Qwen3, so nothing to update
            state_dict_adapter=Qwen3StateDictAdapter,
        )

    def _layer(self) -> Qwen3TransformerBlock.Config:
        normal = partial(nn.init.normal_, std=0.02)
        # Outputs that add to the residual stream start smaller, by depth (as torchtitan does).
        residual = partial(nn.init.normal_, std=0.02 / (2 * self.n_layers) ** 0.5)
        experts = {"w1_EFD": normal, "w2_EDF": residual, "w3_EFD": normal}
        linear = {"weight": normal, "bias": nn.init.zeros_}
        return Qwen3TransformerBlock.Config(
            attention_norm=self._norm(self.dim),
            ffn_norm=self._norm(self.dim),
            attention=make_gqa_config(
                dim=self.dim,
                n_heads=self.n_heads,
                n_kv_heads=self.n_kv_heads,
                head_dim=self.head_dim,
                wqkv_param_init=linear,
                wo_param_init={"weight": residual, "bias": nn.init.zeros_},
                # Flex attention has no backward on CPU; SDPA is causal over the whole sequence.
                inner_attention=(
                    ScaledDotProductAttention.Config() if on_cpu() else FlexAttention.Config()
                ),
                fuse_qkv=True,
                rope=CosSinRoPE.Config(
                    dim=self.head_dim, max_seq_len=self.max_seq_len, theta=self.rope_theta
                ),
                qk_norm=self._norm(self.head_dim),
            ),
            moe=make_moe_config(
                num_experts=self.num_experts,
                router=make_router_config(
                    dim=self.dim,
                    num_experts=self.num_experts,
                    gate_param_init=linear,
                    top_k=self.top_k,
                    score_func="softmax",
                    route_norm=True,
                ),
                routed_experts=make_routed_experts_config(
                    dim=self.dim,
                    hidden_dim=self.moe_hidden_dim,
                    num_experts=self.num_experts,
                    top_k=self.top_k,
                    param_init=experts,
                    comm_backend="standard",
                ),
                load_balance_coeff=None,
            ),
        )

    def _norm(self, width: int) -> RMSNorm.Config:
        return RMSNorm.Config(
            normalized_shape=width, eps=self.norm_eps, param_init={"weight": nn.init.ones_}
        )
