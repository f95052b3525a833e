"""What one rank of a job holds on its device, by term, from the layout that training would build.

Parameters are exact: torchtitan itself shards the model, on the meta device and over a process
group that talks to nobody. Balancing is what ``execution/buffers.py`` allocates. Activations and
logits are the estimates of ``activations.py``. Not counted: the CUDA context, communication buffers
of NCCL, and fragmentation.
"""

import dataclasses
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config.override import apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy
from torchtitan.distributed.pipeline_parallel import (
    _generate_llm_fqn_per_model_part,
    _get_pipeline_metadata,
)
from torchtitan.distributed.utils import init_fake_mode, set_spmd_backend
from torchtitan.tools import utils

from topoep_titan.execution.buffers import buffer_bytes
from topoep_titan.execution.one_sided import ONE_SIDED
from topoep_titan.titan.activations import (
    backward_bytes_of_layer,
    is_moe,
    kept_bytes_of_layer,
    logits_bytes,
)
from topoep_titan.titan.config import used_slots
from topoep_titan.titan.job import complete
from topoep_titan.titan.trainer import TopoEPTrainer

ADAM_STATES = 2  # exp_avg and exp_avg_sq, in the parameters' dtype


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank of a pipeline stage (or of several, under an interleaved schedule)."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int  # parameters and gradients of whole layers, which FSDP holds while it uses them
    balancing: int  # the four buffers of execution/buffers.py
    activations: int  # estimated
    logits: int  # estimated

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class _Parameter:
    kept: int  # elements of this rank's shard
    whole: int  # elements once FSDP has gathered it (still a slice under expert or tensor parallel)


def memory_of_ranks(config: TopoEPTrainer.Config, nproc: int) -> list[RankMemory]:
    """One entry a pipeline rank; all ranks of one hold the same. ``config`` is a checked job."""
    parameters = _sharded_parameters(config, nproc)
    memory = []
    for rank, modules in enumerate(_modules_of_ranks(config, nproc)):
        blocks = defaultdict(list)
        for name, parameter in parameters.items():
            block = next((m for m in modules if name.startswith(f"{m}.")), None)
            if block is not None:  # FSDP gathers the last norm with the head
                blocks["lm_head" if block == "norm" else block].append(parameter)
        memory.append(_rank_memory(config, rank, blocks))
    return memory


def parameter_counts(config: TopoEPTrainer.Config) -> tuple[int, int]:
    """(total, active for one token) over the whole model."""
    with torch.device("meta"):
        model = config.model.build_spec(config.base).model.build()
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    total = sum(counts.values())
    routed = sum(count for name, count in counts.items() if "routed_experts" in name)
    return total, total - routed + routed * config.model.top_k // config.model.num_experts


def _sharded_parameters(config: TopoEPTrainer.Config, nproc: int) -> dict[str, _Parameter]:
    """By name, of the rank with the largest shards (rank 0). Pipeline stages divide the names."""
    job = complete(config, Path("."))
    parallelism = dataclasses.replace(job.parallelism, pipeline_parallel_degree=1)
    spec = job.model_spec
    init_fake_mode(nproc // job.parallelism.pipeline_parallel_degree)
    try:
        dims = ParallelDims.from_config(parallelism, dist.get_world_size())
        set_spmd_backend(parallelism.spmd_backend)
        spec.model.update_from_config(config=dataclasses.replace(job, parallelism=parallelism))
        apply_overrides(job.override, job)
        with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[job.training.dtype]):
            model = spec.model.build()
        model = spec.parallelize_fn(
            model,
            parallel_dims=dims,
            training=job.training,
            parallelism=parallelism,
            compile_config=job.compile,
            ac_config=None,
            dump_folder="",
        )
        return {name: _measured(parameter) for name, parameter in model.named_parameters()}
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it holds meshes of the group that is gone


def _measured(parameter: torch.Tensor) -> _Parameter:
    if not isinstance(parameter, DTensor):
        return _Parameter(parameter.numel(), parameter.numel())
    mesh, kept = parameter.device_mesh, parameter.to_local().numel()
    degree = math.prod(
        mesh.size(i)
        for i, name in enumerate(mesh.mesh_dim_names)
        if name in ("dp_shard", "fsdp", "efsdp") and parameter.placements[i].is_shard()
    )
    return _Parameter(kept, kept * degree)


def _modules_of_ranks(config: TopoEPTrainer.Config, nproc: int) -> list[list[str]]:
    """Names of the modules on each pipeline rank, as torchtitan would split them."""
    ranks = config.parallelism.pipeline_parallel_degree
    if ranks == 1:
        stages = _generate_llm_fqn_per_model_part(1, config.model.n_layers)
    else:
        dims = ParallelDims.from_config(config.parallelism, nproc)
        model = config.model.build_spec(config.base).model
        metadata = _get_pipeline_metadata(dims, config.parallelism, model)
        stages = _generate_llm_fqn_per_model_part(*metadata)
    modules = [[] for _ in range(ranks)]
    for i, names in enumerate(stages):
        modules[i % ranks] += names  # interleaved schedules go round
    return modules


def _rank_memory(
    config: TopoEPTrainer.Config, rank: int, blocks: dict[str, list[_Parameter]]
) -> RankMemory:
    training, element = config.training, _size(config.training.mixed_precision_param)
    kept = sum(p.kept for block in blocks.values() for p in block) * _size(training.dtype)
    layers = [int(name.removeprefix("layers.")) for name in blocks if name.startswith("layers.")]
    tokens = _tokens(config)
    balancing, expert_gradients = _balancing(config) if _has_moe(config, layers) else (0, 0)
    return RankMemory(
        parameters=kept,
        gradients=kept,
        optimizer=ADAM_STATES * kept,
        gathered=_gathered(config, blocks),
        balancing=balancing,
        activations=_activations(config, rank, layers, tokens, element) + expert_gradients,
        logits=_logits(config, tokens, element) if "lm_head" in blocks else 0,
    )


def _has_moe(config: TopoEPTrainer.Config, layers: list[int]) -> bool:
    return any(is_moe(config.model, layer) for layer in layers)


def _logits(config: TopoEPTrainer.Config, tokens: int, element: int) -> int:
    every = tokens * logits_bytes(config.model.vocab_size, element)
    return every // config.parallelism.tensor_parallel_degree  # the head is split by vocabulary


def _gathered(config: TopoEPTrainer.Config, blocks: dict[str, list[_Parameter]]) -> int:
    """Whole blocks beside the shards. Usually the block in use and the next one's parameters, and
    the gradients of one. Where FSDP does not drop blocks after forward (by default under pipeline
    parallelism) it holds all parameters, and gradients add up in the reduction's dtype until the
    last microbatch."""
    whole = [sum(p.whole for p in block) for block in blocks.values()]
    parallelism, training = config.parallelism, config.training
    element, reduced = _size(training.mixed_precision_param), _size(training.mixed_precision_reduce)
    pipelined = parallelism.pipeline_parallel_degree > 1
    drops = get_fsdp_reshard_after_forward_policy(parallelism.fsdp_reshard_after_forward, pipelined)
    largest = sorted(whole)[-2:]
    parameters = sum(largest if drops else whole) * element
    gradients = sum(whole) * reduced if pipelined else largest[-1] * (element + reduced)
    return parameters + gradients


def _balancing(config: TopoEPTrainer.Config) -> tuple[int, int]:
    """Bytes of (the buffers, what one layer's backward makes of its experts: float32 gradients, and
    with float8 experts their rounded weights)."""
    model, topoep = config.model, config.topoep
    ranks = config.parallelism.expert_parallel_degree
    slots = used_slots(topoep.planner, topoep.replica_slots, ranks)
    elements = 3 * model.dim * model.moe_hidden_dim
    buffers = buffer_bytes(
        elements * _size(topoep.expert_dtype),
        experts=model.num_experts,
        ranks=ranks,
        replica_slots=slots,
        mains=(topoep.transport in ONE_SIDED and slots > 0)
        or config.training.mixed_precision_param != topoep.expert_dtype,
    )
    each = 4 + ("float8_experts" in config.converters)
    return buffers, (model.num_experts // ranks + slots) * elements * each


def _activations(
    config: TopoEPTrainer.Config, rank: int, layers: list[int], tokens: int, element: int
) -> int:
    """Of all microbatches in flight, and of the one layer that backward is in."""
    model = config.model
    mode = _checkpointing(config)
    kept = sum(kept_bytes_of_layer(model, layer, mode, element) for layer in layers)
    again = 0 if mode == "none" else 1
    working = max(
        (
            again * kept_bytes_of_layer(model, layer, "none", element)
            + backward_bytes_of_layer(model, layer, element)
            for layer in layers
        ),
        default=0,
    )
    # With sequence and tensor parallelism a rank keeps its share of nearly everything.
    share = tokens // config.parallelism.tensor_parallel_degree
    return share * (kept * _in_flight(config, rank) + working)


def _in_flight(config: TopoEPTrainer.Config, rank: int) -> int:
    """Microbatches whose activations a pipeline rank holds at once; for schedules other than 1F1B
    all of them, an upper bound."""
    parallelism = config.parallelism
    ranks = parallelism.pipeline_parallel_degree
    if ranks == 1:
        return 1
    microbatches = config.training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    one_forward_one_backward = parallelism.pipeline_parallel_schedule.lower() == "1f1b"
    return min(microbatches, ranks - rank) if one_forward_one_backward else microbatches


def _tokens(config: TopoEPTrainer.Config) -> int:
    """Tokens of one microbatch on one rank."""
    pipelined = config.parallelism.pipeline_parallel_degree > 1
    sequences = (
        config.parallelism.pipeline_parallel_microbatch_size
        if pipelined
        else config.training.local_batch_size
    )
    return sequences * config.training.seq_len


def _checkpointing(config: TopoEPTrainer.Config) -> str:
    policy = config.activation_checkpoint
    if policy is None:
        return "none"
    return re.sub("AC$", "", type(policy)._owner.__name__).lower()


def _size(dtype: str) -> int:
    return getattr(torch, dtype).itemsize
