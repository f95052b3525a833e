"""A model from a Hugging Face folder, in one process: for parity checks, evaluation, inspection."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger

from topoep_titan.errors import InputError
from topoep_titan.models.family import ModelConfig
from topoep_titan.models.hf_config import read_hf_config
from topoep_titan.models.hf_files import HFCheckpoint, match, open_checkpoint
from topoep_titan.models.hf_names import Place
from topoep_titan.models.router import BalancedRouter
from topoep_titan.titan.config import TopoEPConfig, expert_settings
from topoep_titan.titan.routed_experts import replicated


def load_hf(folder: str | Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model of ``folder`` with its weights: ``forward(input_ids (B, L)) -> logits (B, L, V)``.

    Causal over the whole sequence, in evaluation mode, computed in ``dtype`` (the selection bias
    stays float32), experts through our own execution without replicas. ``model.config_fields`` is
    the ``[model]`` table. Gradients work. Raises InputError for whatever is wrong in the folder,
    and for token ids beyond the vocabulary.
    """
    folder = Path(folder)
    fields = read_hf_config(folder)
    checkpoint = open_checkpoint(folder)
    wanted, skipped = match(checkpoint, fields)
    if skipped:
        logger.info(f"{folder}: skipped {len(skipped)} tensors, {skipped[0]} to {skipped[-1]}")
    model = _build(fields, dtype)
    model.load_state_dict(_gather(checkpoint, wanted, dtype), assign=True)
    model.config_fields = fields
    model.register_forward_pre_hook(_check_ids)
    return model.eval()


@contextlib.contextmanager
def record_routing(model: nn.Module) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Collects the routing of the forward passes made inside the ``with`` block:

    with record_routing(model) as routing:
        model(input_ids)
    ids_BLK, weights_BLK = routing[3]      # of MoE layer 3, in the last pass
    """
    routing, hooks = {}, []
    for name, module in model.named_modules():
        if isinstance(module, BalancedRouter):
            layer = int(name.split("layers.")[1].split(".")[0])

            def record(module, inputs, output, layer=layer):
                weights_BLK, ids_BLK, _ = output
                routing[layer] = ids_BLK.detach(), weights_BLK.detach()

            hooks.append(module.register_forward_hook(record))
    try:
        yield routing
    finally:
        for hook in hooks:
            hook.remove()


def _build(fields: ModelConfig, dtype: torch.dtype) -> nn.Module:
    """On the meta device but for its buffers (rotary cache, selection bias)."""
    config = fields.build_spec(fields.MODEL_TYPE).model
    expert_dtype = str(dtype).removeprefix("torch.")
    experts = expert_settings(TopoEPConfig(planner="none", expert_dtype=expert_dtype), [])
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        if layer.moe is not None:
            layer.moe.routed_experts = replicated(layer.moe.routed_experts, **experts)
    with torch.device("meta"):
        model = config.build()
    for module in model.modules():
        if isinstance(module, Module):
            module._init_self_buffers(buffer_device=torch.device("cpu"))
    return model


def _gather(
    checkpoint: HFCheckpoint, wanted: dict[str, Place], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Our state dict, one copy of the weights; matrices of experts are written into their place."""
    state, experts = {}, {}
    for name, place in wanted.items():
        kind = torch.float32 if place.name.endswith("expert_bias_E") else dtype
        if place.expert is None:
            state[place.name] = checkpoint.read(name).to(kind, copy=True)
        else:
            experts.setdefault(place.name, []).append((place.expert, name))
    for ours, parts in experts.items():
        state[ours] = torch.empty(len(parts), *wanted[parts[0][1]].shape, dtype=dtype)
        for expert, name in parts:
            state[ours][expert] = checkpoint.read(name)
    return state


def _check_ids(model: nn.Module, arguments: tuple[Tensor, ...]) -> None:
    ids, vocabulary = arguments[0], model.config_fields.vocab_size
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise InputError(
            f"token ids {int(ids.min())} to {int(ids.max())} do not fit the vocabulary of "
            f"{vocabulary}; encode with the model's own tokenizer"
        )
    if ids.shape[-1] > model.config_fields.max_seq_len:
        raise InputError(
            f"{ids.shape[-1]} tokens do not fit max_position_embeddings "
            f"{model.config_fields.max_seq_len}; give shorter sequences"
        )
