"""DeepEP's buffer, by way of torchtitan; and what this machine lacks for it. Not yet run."""

import importlib.util
from functools import partial
from typing import Any

import torch

from topoep_titan.execution.deepep import OpenBuffer


def deepep_missing() -> str | None:
    """What ``topoep.dispatcher = "deepep"`` lacks here, or None."""
    if importlib.util.find_spec("deep_ep") is None:
        return "the deep_ep package (2.0 or later, https://github.com/deepseek-ai/DeepEP)"
    if not torch.cuda.is_available():
        return "a CUDA device"
    try:
        from deep_ep import ElasticBuffer  # noqa: F401
    except ImportError as error:
        return f"deep_ep 2.0 or later, whose ElasticBuffer can be imported ({error})"
    return None


def buffer_opener(group) -> OpenBuffer:
    """For ``Engine.open_buffer``: one buffer a process, made larger when a call needs it."""
    return partial(_open, group)


def _open(group, width: int, tokens: int, top_k: int, slots: int) -> tuple[Any, int]:
    # Imported late: the module registers its operators, and raises without deep_ep.
    from torchtitan.distributed.deepep import deepep

    buffer = deepep.get_buffer(group, hidden=width, num_max_tokens_per_rank=tokens, num_topk=top_k)
    return buffer, deepep._resolve_dispatch_num_sms(buffer, slots, top_k)
