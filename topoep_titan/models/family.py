"""What the model families share: the common fields of ``[model]``, and the parts of a decoder.

Every dimension of a published model is a field; parts are torchtitan's own, built from plain
numbers. Letters: D model width, E experts, K top-k.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from torch import nn
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.models.common import Embedding, Linear
from torchtitan.models.common.attention import (
    FlexAttention,
    GQAttention,
    ScaledDotProductAttention,
)
from torchtitan.models.common.config_utils import (
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
)
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.moe import MoE
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import RoPE
from torchtitan.protocols.model_spec import ModelSpec

from topoep_titan.errors import InputError
from topoep_titan.models.router import BalancedRouter
from topoep_titan.titan.device import on_cpu

INIT_STD = 0.02  # initializer_range of all three published config.json


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The ``[model]`` table; a family adds its own fields and ``build_spec``."""

    MODEL_TYPE: ClassVar[str]
    """``model_type`` in the published config.json."""

    n_layers: int
    dim: int
    n_heads: int
    moe_hidden_dim: int
    """Width F of one expert."""
    num_experts: int
    top_k: int
    vocab_size: int
    max_seq_len: int
    rope_theta: float
    norm_eps: float

    yarn_factor: float = 1.0
    """s of YaRN; 1 is off. On or off whatever the sequence length is."""
    yarn_original_len: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    rope_amplitude: float = 1.0
    """Multiplies cosine and sine (YaRN's attention factor)."""

    balance: Literal["none", "bias", "aux"] = "none"
    """How training levels the experts' load: "bias" moves a selection bias by the sign of the load
    after every step (no loss), "aux" adds the family's published auxiliary loss."""
    aux_coeff: float = 1e-3
    """Of the auxiliary loss."""
    bias_step: float = 1e-3
    """How far "bias" moves it (DeepSeek-V3, section 4.2, and GLM-4.5: 0.001, over many steps)."""

    def build_spec(self, flavor: str) -> ModelSpec:
        raise NotImplementedError

    @property
    def has_selection_bias(self) -> bool:
        return self.balance == "bias"

    def bias_hook(self):
        """What moves the selection bias before each optimizer step, if anything does."""
        return register_moe_load_balancing_hook if self.balance == "bias" else None

    def decoder_parts(self) -> dict[str, Any]:
        """Everything of a Decoder.Config but its layers."""
        return {
            "dim": self.dim,
            "vocab_size": self.vocab_size,
            "norm": norm(self.dim, self.norm_eps),
            "tok_embeddings": Embedding.Config(
                num_embeddings=self.vocab_size,
                embedding_dim=self.dim,
                param_init={"weight": normal()},
            ),
            "lm_head": linear(self.dim, self.vocab_size),
        }

    def rope_fields(self, dim: int) -> dict[str, Any]:
        """Of a rope Config that rotates ``dim`` dimensions."""
        return {
            "dim": dim,
            "max_seq_len": self.max_seq_len,
            "theta": self.rope_theta,
            "scaling": "yarn" if self.yarn_factor > 1 else "none",
            "rope_factor": self.yarn_factor,
            "original_seq_len": self.yarn_original_len,
            "beta_fast": self.yarn_beta_fast,
            "beta_slow": self.yarn_beta_slow,
            "amplitude": self.rope_amplitude,
        }

    @property
    def residual_std(self) -> float:
        """Outputs that add to the residual stream start smaller, by depth (as torchtitan does)."""
        return INIT_STD / (2 * self.n_layers) ** 0.5


def check_model(model: ModelConfig) -> None:
    """Raise InputError with the first relation between the fields that cannot be built."""
    dense = getattr(model, "n_dense_layers", 0)
    groups, kept = getattr(model, "num_groups", 1), getattr(model, "groups_kept", 1)
    kv_heads, head_dim = getattr(model, "n_kv_heads", 1), getattr(model, "head_dim", 2)
    rotary_dim = getattr(model, "rotary_dim", head_dim)
    wrong = {
        f"model.n_dense_layers ({dense}) must leave an MoE layer of model.n_layers "
        f"({model.n_layers})": not 0 <= dense < model.n_layers,
        f"model.num_groups ({groups}) must divide model.num_experts ({model.num_experts})": groups
        < 1
        or model.num_experts % groups,
        f"model.groups_kept ({kept}) must be 1 to model.num_groups ({groups})": not 1
        <= kept
        <= groups,
        f"model.top_k ({model.top_k}) must be 1 to the experts in the groups kept "
        f"({model.num_experts} x {kept} / {groups})": not (
            1 <= model.top_k <= model.num_experts * kept // max(groups, 1)
        ),
        f"model.n_kv_heads ({kv_heads}) must divide model.n_heads ({model.n_heads})": kv_heads < 1
        or model.n_heads % kv_heads,
        f"model.rotary_dim ({rotary_dim}) must be even and at most model.head_dim "
        f"({head_dim})": rotary_dim % 2 or not 0 < rotary_dim <= head_dim,
    }
    for message, holds in wrong.items():
        if holds:
            raise InputError(message)


def normal(std: float = INIT_STD):
    return partial(nn.init.normal_, std=std)


def norm(width: int, eps: float) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=width, eps=eps, param_init={"weight": nn.init.ones_})


def linear(inputs: int, outputs: int, std: float = INIT_STD) -> Linear.Config:
    init = {"weight": normal(std), "bias": nn.init.zeros_}
    return Linear.Config(in_features=inputs, out_features=outputs, param_init=init)


def feed_forward(model: ModelConfig, hidden_dim: int) -> FeedForward.Config:
    return FeedForward.Config(
        w1=linear(model.dim, hidden_dim),
        w2=linear(hidden_dim, model.dim, model.residual_std),
        w3=linear(model.dim, hidden_dim),
    )


def inner_attention():
    """Flex attention masks documents but has no backward on CPU; there SDPA is causal over all."""
    return ScaledDotProductAttention.Config() if on_cpu() else FlexAttention.Config()


def grouped_query_attention(
    model: ModelConfig,
    *,
    n_kv_heads: int,
    head_dim: int,
    rope: RoPE.Config,
    qkv_bias: bool,
    qk_norm: bool,
) -> GQAttention.Config:
    attention = make_gqa_config(
        dim=model.dim,
        n_heads=model.n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        wqkv_param_init={"weight": normal(), "bias": nn.init.zeros_},
        wo_param_init={"weight": normal(model.residual_std)},
        inner_attention=inner_attention(),
        fuse_qkv=True,
        rope=rope,
        qk_norm=norm(head_dim, model.norm_eps) if qk_norm else None,
    )
    attention.qkv_linear.wqkv.bias = qkv_bias
    return attention


def mixture_of_experts(
    model: ModelConfig,
    *,
    score_func: Literal["softmax", "sigmoid"],
    route_norm: bool,
    route_scale: float = 1.0,
    num_groups: int = 1,
    groups_kept: int = 1,
    group_score: Literal["max", "top2_sum"] = "top2_sum",
    aux_scope: Literal["sequence", "batch"],
    aux_scale: float,
    device_scale: float = 0.0,
    communication_scale: float = 0.0,
    shared_hidden_dim: int = 0,
) -> MoE.Config:
    """An MoE layer; the scales of losses count only where ``model.balance`` is "aux"."""
    grouped, auxiliary = num_groups > 1, model.balance == "aux"
    return make_moe_config(
        num_experts=model.num_experts,
        router=BalancedRouter.Config(
            num_experts=model.num_experts,
            gate=linear(model.dim, model.num_experts),
            top_k=model.top_k,
            score_func=score_func,
            route_norm=route_norm,
            route_scale=route_scale,
            num_expert_groups=num_groups if grouped else None,
            num_limited_groups=groups_kept if grouped else None,
            group_score=group_score,
            aux_scope=aux_scope,
            aux_scale=aux_scale if auxiliary else 0.0,
            device_scale=device_scale if auxiliary and grouped else 0.0,
            communication_scale=communication_scale if auxiliary and grouped else 0.0,
        ),
        routed_experts=make_routed_experts_config(
            dim=model.dim,
            hidden_dim=model.moe_hidden_dim,
            num_experts=model.num_experts,
            top_k=model.top_k,
            param_init={
                "w1_EFD": normal(),
                "w2_EDF": normal(model.residual_std),
                "w3_EFD": normal(),
            },
            comm_backend="standard",
        ),
        shared_experts=feed_forward(model, shared_hidden_dim) if shared_hidden_dim else None,
        # torchtitan keeps a selection bias where this is set; `bias_hook` decides if it moves.
        load_balance_coeff=model.bias_step if model.has_selection_bias else None,
    )
