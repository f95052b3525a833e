"""Whether a job's parallel layout fits its processes, its batch and its model."""

from types import SimpleNamespace

from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    get_schedule_class,
)
from torchtitan.distributed.pipeline_parallel import (
    _generate_llm_fqn_per_model_part,
    _get_pipeline_metadata,
)

from topoep_titan.errors import InputError
from topoep_titan.titan.trainer import TopoEPTrainer

# V-shaped ones (ZBV, DualPipeV) run the first stage's input gradient apart, which is not there.
SCHEDULES = (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)


def check_layout(config: TopoEPTrainer.Config, nproc: int) -> None:
    """Raise InputError with the first thing that does not fit ``nproc`` processes."""
    parallelism, training, model = config.parallelism, config.training, config.model
    tp, pp = parallelism.tensor_parallel_degree, parallelism.pipeline_parallel_degree
    ep, replicate = parallelism.expert_parallel_degree, parallelism.data_parallel_replicate_degree
    if parallelism.context_parallel_degree != 1:
        raise InputError(
            f"parallelism.context_parallel_degree is {parallelism.context_parallel_degree}; "
            "context parallelism is not supported yet, set it to 1"
        )
    if nproc < 1:
        raise InputError(f"{nproc} processes cannot train; give at least 1")
    shard = parallelism.data_parallel_shard_degree
    fixed = replicate * tp * pp
    if nproc % fixed or (shard > 0 and shard * fixed != nproc):
        wanted = shard * fixed if shard > 0 else f"a multiple of {fixed}"
        raise InputError(
            f"{nproc} processes do not fit the layout (data_parallel_replicate {replicate} x "
            f"data_parallel_shard {shard} x tensor {tp} x pipeline {pp}), which wants {wanted}; "
            "change the number of processes or [parallelism]"
        )
    shard = nproc // fixed
    if shard * tp % ep:
        raise InputError(
            f"parallelism.expert_parallel_degree ({ep}) must divide data_parallel_shard x tensor "
            f"({shard} x {tp}) on {nproc} processes"
        )
    microbatches = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
    if pp > 1 and microbatches < pp:
        raise InputError(
            f"training.local_batch_size ({training.local_batch_size}) makes {microbatches} "
            f"pipeline microbatches; {pp} stages need at least {pp}"
        )
    if model.num_experts % ep:
        raise InputError(
            f"model.num_experts ({model.num_experts}) must be a multiple of "
            f"parallelism.expert_parallel_degree ({ep})"
        )
    per_node = config.topoep.ranks_per_node or ep
    if ep % per_node and per_node % ep:
        raise InputError(
            f"topoep.ranks_per_node ({per_node}) must divide "
            f"parallelism.expert_parallel_degree ({ep}), or be a multiple of it"
        )
    for name in ("n_heads", "n_kv_heads"):
        heads = getattr(model, name, 0)  # latent attention has no key-value heads
        if heads % tp:
            raise InputError(
                f"model.{name} ({heads}) must be a multiple of "
                f"parallelism.tensor_parallel_degree ({tp})"
            )
    if pp > 1:
        _check_pipeline(config)
    if training.seq_len > model.max_seq_len or training.seq_len % tp:
        raise InputError(
            f"training.seq_len ({training.seq_len}) must be at most model.max_seq_len "
            f"({model.max_seq_len}) and a multiple of the tensor-parallel degree ({tp})"
        )
    step = training.local_batch_size * replicate * shard
    if training.global_batch_size > 0 and training.global_batch_size % step:
        raise InputError(
            f"training.global_batch_size ({training.global_batch_size}) must be a multiple of "
            f"local_batch_size x data-parallel ranks ({step})"
        )


def _check_pipeline(config: TopoEPTrainer.Config) -> None:
    parallelism, layers = config.parallelism, config.model.n_layers
    name = parallelism.pipeline_parallel_schedule
    known = {schedule.__name__.removeprefix("Schedule").lower() for schedule in SCHEDULES}
    if name.lower() not in known:
        raise InputError(
            f"parallelism.pipeline_parallel_schedule is {name!r}; "
            f"choose one of: {', '.join(s.__name__.removeprefix('Schedule') for s in SCHEDULES)}"
        )
    stages = parallelism.pipeline_parallel_degree
    if not issubclass(get_schedule_class(name), PipelineScheduleSingle):
        stages *= 2  # virtual stages a rank, unless layers_per_stage says otherwise
    if parallelism.pipeline_parallel_layers_per_stage is None and layers < stages:
        raise InputError(
            f"model.n_layers ({layers}) is less than the {stages} stages of "
            f"pipeline_parallel_schedule {name!r}"
        )
    if parallelism.module_fqns_per_model_part is None:
        ranks = SimpleNamespace(pp=parallelism.pipeline_parallel_degree)
        model = SimpleNamespace(layers=range(layers))
        try:
            _generate_llm_fqn_per_model_part(*_get_pipeline_metadata(ranks, parallelism, model))
        except ValueError as error:
            raise InputError(
                f"{layers} layers cannot be cut into a pipeline of {ranks.pp} ranks: {error} "
                "(parallelism.pipeline_parallel_layers_per_stage, _first_stage_less_layers, "
                "_last_stage_less_layers)"
            ) from None
