"""Estimate of what a forward pass keeps for backward, per token and layer, from the model's widths.

An estimate for a level load and the ``alltoall`` dispatcher: what eager kernels save, counted one
by one; fragmentation and what a compiler would fuse are not in it.

Letters: D model width, F expert width, E experts, K top-k, V vocabulary. Values are elements in the
compute dtype unless a name says bytes; float32 values count by their bytes.
"""

from typing import Literal

from topoep_titan.models.family import ModelConfig

FP32 = 4  # bytes
Checkpointing = Literal["none", "selective", "full"]


def kept_bytes_of_layer(
    model: ModelConfig, layer: int, checkpointing: Checkpointing, element: int
) -> int:
    """Bytes a token that ``layer`` keeps from its forward to its backward.

    ``element`` is the size of the compute dtype. Full checkpointing keeps the layer's input;
    selective also attention's output and, of the dense matmuls, every second output (torchtitan's
    policy; the routed experts are run again).
    """
    dim = model.dim
    if checkpointing == "full":
        return dim * element
    attention_out, attention_kept, attention_matmuls = _attention(model)
    ffn_kept, ffn_matmuls = _feed_forward(model, layer)
    if checkpointing == "selective":
        matmuls = (attention_matmuls + ffn_matmuls) // 2
        return (dim + attention_out + matmuls) * element + model.n_heads * FP32
    # Both norms keep their input, and what they return is kept by the matmuls that read it.
    kept = (4 * dim + attention_kept + ffn_kept) * element + model.n_heads * FP32
    return kept + (_router_fp32(model) * FP32 if is_moe(model, layer) else 0)


def backward_bytes_of_layer(model: ModelConfig, layer: int, element: int) -> int:
    """Bytes a token that the backward of one layer holds beside what was kept (TopoEP execution:
    output gradients and rows expanded per assignment, three gradients of the hidden width)."""
    if not is_moe(model, layer):
        return (3 * getattr(model, "dense_hidden_dim", 0) + 2 * model.dim) * element
    return model.top_k * (3 * model.dim + 4 * model.moe_hidden_dim) * element


def logits_bytes(vocab: int, element: int) -> int:
    """Bytes a token of logits, their float32 copy, log-softmax and gradient at the worst moment."""
    return vocab * (2 * FP32 + (element if element < FP32 else 0))


def is_moe(model: ModelConfig, layer: int) -> bool:
    return layer >= getattr(model, "n_dense_layers", 0)


def _attention(model: ModelConfig) -> tuple[int, int, int]:
    """(output, everything kept beside the norms before it, outputs of matmuls)."""
    if hasattr(model, "kv_lora_rank"):  # latent attention: DeepSeek-V2
        rope = model.qk_rope_head_dim
        query = model.n_heads * (model.qk_nope_head_dim + rope)
        value = model.n_heads * model.v_head_dim
        up = model.n_heads * (model.qk_nope_head_dim + model.v_head_dim)
        down = model.kv_lora_rank + rope
        matmuls = model.q_lora_rank + query + down + up + model.dim
        # The latents before and after their norms; query and key after rope; the values, a view of
        # the whole up-projection; the output, and as the last matmul reads it.
        latents = 2 * model.q_lora_rank + down + model.kv_lora_rank
        return value, latents + 2 * query + up + 2 * value, matmuls
    query, key = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    has_norm = getattr(model, "qk_norm", True)  # Qwen3 always has
    kept = 3 * query + 2 * key + (query + key if has_norm else 0)
    return query, kept, query + 2 * key + model.dim


def _feed_forward(model: ModelConfig, layer: int) -> tuple[int, int]:
    """(everything kept beside the norm before it, outputs of dense matmuls)."""
    if not is_moe(model, layer):
        return 4 * model.dense_hidden_dim, 2 * model.dense_hidden_dim + model.dim
    shared = getattr(model, "num_shared_experts", 0) * model.moe_hidden_dim
    # Of each assignment: the arrived row, and both hidden vectors.
    routed = model.top_k * (model.dim + 2 * model.moe_hidden_dim)
    return routed + 4 * shared, (2 * shared + model.dim) if shared else 0


def _router_fp32(model: ModelConfig) -> int:
    """float32 values: the gate's scores, and the chosen ones on their way to the experts."""
    return model.num_experts + 3 * model.top_k
