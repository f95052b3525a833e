"""Which numbers and paths a recipe may hold, key by key: one table, and a rule for all the rest.

Every integer is a size or a count, from 1 to MOST, and every float is finite, unless RANGES says
otherwise. Paths stay in the run's folder, or runs would share what identifies one of them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from topoep_titan.errors import InputError
from topoep_titan.titan.run_folder import stays_inside

MOST = 2**31 - 1
SEEDS = 2**63 - 1  # what TOML and torch's generators both hold
MOST_SAMPLE = 2**20  # tokens of one placement
MOST_WEIGHT = 10**6  # per cent; beyond it a planner's 64-bit scores could overflow


@dataclass(frozen=True)
class Range:
    low: int
    high: float = MOST
    above: bool = False  # ``low`` itself is out
    also: int | None = None  # what stands for torchtitan's own choice

    def remedy(self, value: float) -> str | None:
        """What to give instead of ``value``; None when it is in the range."""
        if value == self.also or (
            self.low < value if self.above else self.low <= value <= self.high
        ):
            return None
        if self.high < math.inf and (value > self.high or self.high < MOST):
            return f"{self.low:,} to {self.high:,}"
        lowest = f"a number above {self.low}" if self.above else f"{self.low} or more"
        return lowest if self.also is None else f"{lowest}, or {self.also} for the default"


COUNT, SEED = Range(0), Range(0, SEEDS)
POSITIVE, NOT_NEGATIVE = Range(0, math.inf, above=True), Range(0, math.inf)
FRACTION, DECAY = Range(0, 1), Range(0, 0.999999)  # a decay of 1 would never forget

RANGES = {
    "checkpoint.keep_latest_k": COUNT,
    "checkpoint.load_step": Range(0, also=-1),
    "comm.trace_buf_size": COUNT,
    "dataloader.seed": SEED,
    "debug.seed": SEED,
    "lr_scheduler.decay_ratio": FRACTION,
    "lr_scheduler.min_lr_factor": FRACTION,
    "lr_scheduler.warmup_steps": COUNT,
    "model.aux_coeff": POSITIVE,
    "model.bias_step": POSITIVE,
    "model.communication_coeff": NOT_NEGATIVE,
    "model.device_coeff": NOT_NEGATIVE,
    "model.mscale": NOT_NEGATIVE,
    "model.n_dense_layers": COUNT,
    "model.norm_eps": POSITIVE,
    "model.num_shared_experts": COUNT,
    "model.q_lora_rank": COUNT,
    "model.rope_amplitude": POSITIVE,
    "model.rope_theta": POSITIVE,
    "model.route_scale": POSITIVE,
    "model.yarn_beta_fast": POSITIVE,
    "model.yarn_beta_slow": POSITIVE,
    "model.yarn_factor": Range(1, math.inf),
    "optimizer.beta1": DECAY,
    "optimizer.beta2": DECAY,
    "optimizer.eps": NOT_NEGATIVE,
    "optimizer.lr": NOT_NEGATIVE,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "parallelism.data_parallel_shard_degree": Range(1, also=-1),
    "parallelism.pipeline_parallel_first_stage_less_layers": COUNT,
    "parallelism.pipeline_parallel_last_stage_less_layers": COUNT,
    "placement.balance_weight": Range(0, 10_000),
    "placement.node_weight": Range(0, 1000),
    "placement.sample_tokens": Range(1, MOST_SAMPLE),
    "profiler.profiler_repeat": COUNT,
    "profiler.profiler_skip_first": COUNT,
    "profiler.profiler_skip_first_wait": COUNT,
    "profiler.profiler_warmup": COUNT,
    "topoep.balance_weight": Range(0, MOST_WEIGHT),
    "topoep.replica_slots": COUNT,
    "training.global_batch_size": Range(1, also=-1),
    "training.max_norm": POSITIVE,
    "validator.steps": Range(1, also=-1),
}

INSIDE = {
    "checkpoint.folder",
    "comm.save_traces_folder",
    "debug.save_config_file",
    "metrics.save_tb_folder",
    "profiler.save_memory_snapshot_folder",
    "profiler.save_traces_folder",
}


def check_ranges(table: dict[str, Any]) -> None:
    """Raise InputError with the first value of a resolved recipe that is out of its range."""
    for key, value in _leaves(table):
        if key in INSIDE and not stays_inside(value):
            raise InputError(f"{key} is {value!r}; give a path in the run's folder, without '..'")
        if type(value) is float and not math.isfinite(value):
            raise InputError(f"{key} is {value!r}; give a finite number")
        allowed = RANGES.get(key, Range(1) if type(value) is int else None)
        if allowed and (remedy := allowed.remedy(value)):
            raise InputError(f"{key} is {value!r}; give {remedy}")


def _leaves(table: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
