"""Everything about a job that can be wrong before processes start, one clear message each."""

from pathlib import Path

from topoep_kernels.library import is_built

from data.errors import DataError
from data.shards import open_shards, verify
from topoep_titan.cluster import load_cluster
from topoep_titan.errors import InputError
from topoep_titan.execution.one_sided import ONE_SIDED, missing_for
from topoep_titan.models.family import check_model
from topoep_titan.models.hf_config import read_hf_config, refuse_other_model
from topoep_titan.models.hf_files import match, open_checkpoint
from topoep_titan.planning import planner_named
from topoep_titan.titan.config import cluster_name
from topoep_titan.titan.deepep import deepep_missing
from topoep_titan.titan.device import on_cpu
from topoep_titan.titan.float8 import ALIGNMENT, float8_experts_missing, float8_missing
from topoep_titan.titan.job import resolved_table
from topoep_titan.titan.layout import check_layout
from topoep_titan.titan.ranges import check_ranges
from topoep_titan.titan.resume import VERIFY_LIMIT, damage
from topoep_titan.titan.trainer import TopoEPTrainer

MADE_BY = {"outputs/data/demo": "make demo-data", "outputs/data/corpus": "make data"}


def check_job(
    config: TopoEPTrainer.Config, nproc: int, *, verify_data: bool = True, with_data: bool = True
) -> None:
    """Raise InputError with the first thing that is wrong for ``nproc`` processes.

    ``verify_data`` also reads shards and checkpoint through (one process of a machine is enough);
    ``with_data=False`` leaves them out, for a job of another machine.
    """
    check_ranges(resolved_table(config))
    _check_topoep(config)
    _check_placement(config)
    _check_shuffle(config)
    _check_training(config)
    check_model(config.model)
    check_layout(config, nproc)
    _check_widths(config)
    _check_converters(config)
    _check_checkpoint(config, verify_data)
    if with_data:
        check_data(config, verify_data)


def _check_topoep(config: TopoEPTrainer.Config) -> None:
    topoep = config.topoep
    planner_named(topoep.planner)
    load_cluster(cluster_name(topoep.cluster))
    if topoep.replica_slots > config.model.num_experts:
        raise InputError(
            f"topoep.replica_slots is {topoep.replica_slots}; more than the model's "
            f"{config.model.num_experts} experts are never used"
        )
    if topoep.transport in ONE_SIDED:
        missing = missing_for(topoep.transport)
        if missing:
            raise InputError(
                f"topoep.transport = {topoep.transport!r} needs {missing}; "
                'use "collective", or "auto"'
            )
    if topoep.dispatcher == "deepep":
        _check_deepep(config)
    if topoep.record_trace and config.model.num_experts > 2**15:
        raise InputError(
            f"topoep.record_trace keeps expert ids in int16; model.num_experts is "
            f"{config.model.num_experts}"
        )
    if topoep.router_skew is not None and config.validator.enable:
        raise InputError(
            "topoep.router_skew is synthetic routing, whose loss means nothing; "
            "set validator.enable = false"
        )
    if topoep.router_skew is not None and config.model.balance != "none":
        raise InputError(
            f"topoep.router_skew is synthetic routing, which model.balance = "
            f"{config.model.balance!r} would work against; set it to 'none'"
        )
    if config.compile.enable:
        raise InputError(
            "compile.enable: torch.compile is not supported with plan-driven routed experts yet; "
            "set it to false"
        )
    if not config.training.disable_cuda_graphs:
        raise InputError(
            "training.disable_cuda_graphs must be true: the all-to-all reads its split sizes "
            "on the host"
        )


def _check_placement(config: TopoEPTrainer.Config) -> None:
    placement, dispatcher = config.placement, config.topoep.dispatcher
    if placement.strategy == "contiguous":
        return
    if dispatcher not in ("dedup", "dedup-node"):
        raise InputError(
            f'placement.strategy = "correlated" saves rows of a deduplicating dispatcher; '
            f'topoep.dispatcher is "{dispatcher}", set "dedup" or "dedup-node"'
        )
    if config.parallelism.expert_parallel_degree < 2:
        raise InputError(
            'placement.strategy = "correlated" needs parallelism.expert_parallel_degree of at '
            "least 2: with one rank there is nothing to place"
        )
    if config.checkpoint.enable and getattr(config.checkpoint, "async_mode", "disabled") != (
        "disabled"
    ):
        raise InputError(
            f'checkpoint.async_mode is "{config.checkpoint.async_mode}"; '
            'placement.strategy = "correlated" saves with "disabled" only'
        )
    if not is_built("cpu"):
        raise InputError(
            'placement.strategy = "correlated" needs the compiled CPU library; build it with '
            "`pip install -e .`"
        )


def _check_shuffle(config: TopoEPTrainer.Config) -> None:
    if not config.shuffle.enabled:
        return
    parallelism = config.parallelism
    tp, ep = parallelism.tensor_parallel_degree, parallelism.expert_parallel_degree
    needs = {
        'placement.strategy = "correlated"': config.placement.strategy == "correlated",
        "parallelism.tensor_parallel_degree of at least 2": tp > 1,
        "parallelism.enable_sequence_parallel = true": parallelism.enable_sequence_parallel,
        "parallelism.expert_parallel_degree as a multiple of the tensor-parallel one": ep % tp == 0,
    }
    for need, met in needs.items():
        if not met:
            raise InputError(f"shuffle.enabled needs {need}; change it, or switch shuffling off")


def _check_training(config: TopoEPTrainer.Config) -> None:
    """What torchtitan would find out in the middle of a start."""
    profiler, cycle = config.profiler, config.profiler.profiler_warmup
    cycle += profiler.profiler_active
    if profiler.enable_profiling and profiler.profile_freq < cycle:
        raise InputError(
            f"profiler.profile_freq is {profiler.profile_freq}; give at least profiler_warmup + "
            f"profiler_active ({cycle})"
        )
    if config.debug.moe_force_load_balance:
        raise InputError(
            "debug.moe_force_load_balance is synthetic routing that no result would name; "
            "set topoep.router_skew = 0 for uniform routing"
        )
    if config.comm.mode != "default":
        raise InputError(f"comm.mode is {config.comm.mode!r}; only 'default' is supported")
    if config.training.enable_cpu_offload and on_cpu():
        raise InputError("training.enable_cpu_offload: there is nothing to offload from on a CPU")
    if config.profiler.enable_memory_snapshot and on_cpu():
        raise InputError(
            "profiler.enable_memory_snapshot: PyTorch records a GPU's allocations only; set it to "
            "false"
        )


def _check_widths(config: TopoEPTrainer.Config) -> None:
    """Grouped matrix products (torch._grouped_mm) read rows of whole 16-byte words."""
    dtype = config.topoep.expert_dtype
    multiple = {"bfloat16": 8, "float32": 4, "float64": 1}[dtype]
    for name in ("dim", "moe_hidden_dim"):
        width = getattr(config.model, name)
        if width % multiple:
            raise InputError(
                f"model.{name} is {width}; experts in {dtype} need a multiple of {multiple}"
            )


def _check_deepep(config: TopoEPTrainer.Config) -> None:
    needs = {
        deepep_missing(): deepep_missing() is None,
        'topoep.expert_dtype = "bfloat16", which is what it moves': (
            config.topoep.expert_dtype == "bfloat16"
        ),
        "parallelism.expert_parallel_degree of at least 2": (
            config.parallelism.expert_parallel_degree > 1
        ),
    }
    for need, met in needs.items():
        if not met:
            raise InputError(
                f'topoep.dispatcher = "deepep" needs {need}; '
                'or use "alltoall", "dedup" or "dedup-node"'
            )


def _check_converters(config: TopoEPTrainer.Config) -> None:
    parallelism = config.parallelism
    tensor = parallelism.tensor_parallel_degree
    if "float8" in config.converters:
        missing = float8_missing()
        if missing:
            raise InputError(f'converters = ["float8"] needs {missing}; leave it out')
        if tensor > 1:
            raise InputError(
                f'converters = ["float8"]: each tensor-parallel rank ({tensor}) would scale its '
                "own slice of a row, which is not supported; set "
                "parallelism.tensor_parallel_degree = 1"
            )
    if "float8_experts" in config.converters:
        _check_float8_experts(config)


def _check_float8_experts(config: TopoEPTrainer.Config) -> None:
    model, parallelism, dtype = config.model, config.parallelism, config.topoep.expert_dtype
    what = 'converters: "float8_experts"'
    missing = float8_experts_missing()
    if missing:
        raise InputError(f"{what} needs {missing}; leave it out")
    allowed = ("bfloat16", "float32") if on_cpu() else ("bfloat16",)
    if dtype not in allowed:
        raise InputError(f"{what} needs topoep.expert_dtype = {' or '.join(allowed)}, not {dtype}")
    for name in ("dim", "moe_hidden_dim"):
        if getattr(model, name) % ALIGNMENT:
            raise InputError(
                f"{what} needs widths that are multiples of {ALIGNMENT}; model.{name} is "
                f"{getattr(model, name)}"
            )
    if parallelism.tensor_parallel_degree > 1 and parallelism.expert_parallel_degree == 1:
        raise InputError(
            f"{what}: without expert parallelism each tensor-parallel rank would scale its own "
            "slice of a row; set parallelism.expert_parallel_degree to at least 2"
        )


def _check_checkpoint(config: TopoEPTrainer.Config, verify: bool) -> None:
    """What training starts from, if it is on this machine."""
    checkpoint = config.checkpoint
    if not (checkpoint.enable and checkpoint.initial_load_path):
        return
    folder = Path(checkpoint.initial_load_path)
    if checkpoint.initial_load_in_hf:
        model = read_hf_config(folder)
        refuse_other_model(folder, model, config.model)
        match(open_checkpoint(folder), model)
    elif not (folder / ".metadata").exists():
        raise InputError(
            f"checkpoint.initial_load_path: {folder} is no checkpoint (no .metadata); for a "
            "Hugging Face folder set initial_load_in_hf and initial_load_model_only"
        )
    elif verify and (wrong := damage(folder)):
        raise InputError(f"checkpoint.initial_load_path: {folder} is damaged: {wrong}")
    elif (folder / "config.json").exists():  # written by `convert hf-to-titan`
        refuse_other_model(folder, read_hf_config(folder), config.model)


def check_data(config: TopoEPTrainer.Config, verify_data: bool) -> None:
    """Raise InputError when the recipe's shards are missing, damaged, or not for its vocabulary."""
    folder = Path(config.dataloader.dataset_path)
    try:
        splits = [config.dataloader.split] + ["validation"] * config.validator.enable
        for split in splits:
            open_shards(folder, split, vocab_size=config.model.vocab_size)
        size = sum(file.stat().st_size for file in folder.glob("*") if file.is_file())
        if verify_data and size <= VERIFY_LIMIT:
            verify(folder)
    except DataError as error:
        target = MADE_BY.get(folder.as_posix())
        if target and not folder.exists():
            raise InputError(
                f"dataloader.dataset_path: {folder} is not there; build it: {target}"
            ) from None
        remedy = f" (or: {target})" if target else ""
        raise InputError(f"dataloader.dataset_path: {error}{remedy}") from None
