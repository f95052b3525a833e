"""What each step planned, in TensorBoard, on the terminal and in the run's step log.

Values are means over microbatches, then over the EP groups (data and pipeline parallel), so that
every rank and stage contributes; ``layers`` keeps each MoE layer's.
"""

import dataclasses
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from torchtitan.components.metrics import (
    LoggerContainer,
    MetricsProcessor,
    TensorBoardLogger,
    _get_metrics_rank,
)
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

from topoep_titan.cluster import load_cluster
from topoep_titan.execution.layer import Engine
from topoep_titan.execution.transport import KINDS, LINKS
from topoep_titan.planning.quality import plan_quality
from topoep_titan.titan.balance import BALANCE, gather_balance
from topoep_titan.titan.coupling import COUPLING, gather_coupling
from topoep_titan.titan.device import on_cpu
from topoep_titan.titan.rank_load import gather_rank_loads, picture
from topoep_titan.titan.routed_experts import ReplicatedRoutedExperts
from topoep_titan.titan.step_log import StepLog

MEASURES = (
    "max_over_mean_before",
    "max_over_mean",
    "inter_node_fraction",
    "replica_served_fraction",
    "num_replicas",
    "plan_us",
)
MODELLED = ("compute", "token", "replica", "plan", "total")


class PlanMetrics(MetricsProcessor):
    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        num_layers: int = 0
        """Layers of the model; filled in from it."""

    def __init__(self, config: Config, *, parallel_dims, dump_folder: str, pp_schedule, **kwargs):
        super().__init__(
            config,
            parallel_dims=parallel_dims,
            dump_folder=dump_folder,
            pp_schedule=pp_schedule,
            **kwargs,
        )
        if on_cpu():  # torchtitan takes an unknown device for an A100
            self.gpu_peak_flops = load_cluster("cpu_local").flops
        self.step_log = StepLog(Path(dump_folder))
        self.tokens_per_step = 0  # over all ranks; set by the trainer
        self.step_started = time.perf_counter()
        self.steps_since_log = 0
        self.began = False

    def _build_metric_logger(self, *, config, parallel_dims, dump_folder, pp_schedule, **kwargs):
        """As torchtitan's, but TensorBoard goes to ``tb/`` itself: a resumed run is one curve."""
        rank = _get_metrics_rank(parallel_dims=parallel_dims, pp_schedule=pp_schedule)
        self.writes, self.curves = dist.get_rank() == rank, None
        others = super()._build_metric_logger(
            config=dataclasses.replace(config, enable_tensorboard=False),
            parallel_dims=parallel_dims,
            dump_folder=dump_folder,
            pp_schedule=pp_schedule,
            **kwargs,
        )
        if not (config.enable_tensorboard and self.writes):
            return others
        both = LoggerContainer()
        both.add_logger(others)
        self.curves = _OneCurve(str(Path(dump_folder) / config.save_tb_folder))
        both.add_logger(self.curves)
        return both

    def begin_step(self, step: int) -> None:
        if not self.began and self.writes:  # what a killed run did past its checkpoint comes again
            self.step_log.forget_from(step)
        self.began = True
        for engine in self._engines():
            engine.transport.traffic.drain()  # validation's
            engine.transport.host_syncs = 0
        self.step_started = time.perf_counter()
        self.steps_since_log += 1

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        seconds = time.perf_counter() - self.step_started
        balance = gather_balance(
            self.model_parts, self.config.num_layers, steps=self.steps_since_log
        )
        self.steps_since_log = 0
        loads = gather_rank_loads(self.model_parts, self.config.num_layers)
        layers, modelled_us = self._gather_layers()
        traffic = self._gather_traffic()
        coupling = gather_coupling(self.model_parts, self.config.num_layers)
        layers = [layer | balance[layer["layer"]] | coupling[layer["layer"]] for layer in layers]
        keys = MEASURES + BALANCE + COUPLING
        means = {key: sum(layer[key] for layer in layers) / len(layers) for key in keys if layers}
        scalars = {f"moe/{key}": value for key, value in means.items()}
        scalars |= {f"traffic/{key}": value for key, value in traffic.items()}
        for layer in layers:
            scalars |= {f"moe_layer_{layer['layer']}/{key}": layer[key] for key in keys}
        MetricsProcessor.log(
            self,
            step,
            global_avg_loss,
            global_max_loss,
            grad_norm,
            extra_metrics={**(extra_metrics or {}), **scalars},
        )
        if self.curves and loads:
            image = picture(list(loads.values()))
            self.curves.writer.add_image("moe/rank_load", image, step, dataformats="HWC")
        if self.writes:
            record = {
                "step": step,
                "loss": global_avg_loss,
                "loss_hex": float(global_avg_loss).hex(),
                "seconds": seconds,
                "tokens_per_second": self.tokens_per_step / seconds,
                **means,
                "traffic": traffic,
                "modelled_us": modelled_us,
                "layers": [layer | loads.get(layer["layer"], {}) for layer in layers],
            }
            self.step_log.append(record)

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        super().log_validation(loss, step, extra_metrics)
        if self.writes:
            self.step_log.append({"step": step, "validation_loss": loss})

    def note(self, step: int, text: str) -> None:
        """An event between steps, for whoever watches the run."""
        logger.info(text)
        if self.writes:
            self.step_log.append({"step": step, "note": text})

    def _engines(self) -> list[Engine]:
        """The engines of this rank's layers, each once."""
        modules = (module for part in self.model_parts for module in part.modules())
        experts = (m for m in modules if isinstance(m, ReplicatedRoutedExperts))
        # Layers whose experts are placed differently have engines of one transport.
        return list({id(module.transport): module.engine for module in experts}.values())

    def _gather_traffic(self) -> dict[str, int]:
        """What all ranks sent during this step, and how often one waited for its device."""
        keys = [(kind, link) for kind in KINDS for link in LINKS]
        totals = torch.zeros(2 * len(keys) + 1, dtype=torch.int64)
        for engine in self._engines():
            sent = engine.transport.traffic.drain()
            values = [value for key in keys for value in sent[key]]
            totals += torch.tensor([*values, engine.transport.host_syncs])
        totals = totals.to(device_type)
        dist.all_reduce(totals)
        names = [f"{kind}_{link}_{unit}" for kind, link in keys for unit in ("rows", "bytes")]
        return dict(zip([*names, "host_syncs"], totals.tolist()))

    def _gather_layers(self) -> tuple[list[dict[str, float]], dict[str, float]]:
        """Drain the layers' records; one sum over all ranks makes the means.

        Every rank of an EP group planned the same, so only its first rank contributes.
        """
        keys = MEASURES + MODELLED
        totals = torch.zeros(self.config.num_layers, 1 + len(keys), dtype=torch.float64)
        for part in self.model_parts:
            for name, module in part.named_modules():
                if isinstance(module, ReplicatedRoutedExperts):
                    layer = int(re.search(r"layers\.(\d+)\.", name).group(1))
                    if module.transport.rank == 0:
                        for record in module.records:
                            totals[layer] += _values(module, record)
                    module.records.clear()
        totals = totals.to(device_type)
        dist.all_reduce(totals)
        totals = totals.cpu()
        layers, modelled = [], []
        for layer, (count, *sums) in enumerate(totals.tolist()):
            if count:
                means = {key: value / count for key, value in zip(keys, sums)}
                layers.append({"layer": layer} | {key: means[key] for key in MEASURES})
                modelled.append([means[key] for key in MODELLED])
        mean_us = [sum(column) / len(modelled) for column in zip(*modelled)]
        return layers, dict(zip(MODELLED, mean_us))


class _OneCurve(TensorBoardLogger):
    """What a killed run had logged beyond its checkpoint is logged again: TensorBoard drops the
    older points when a session starts at a step that it has seen."""

    started = False

    def log(self, metrics: dict[str, Any], step: int) -> None:
        if not self.started:
            start = SessionLog(status=SessionLog.START)
            self.writer.file_writer.add_event(Event(step=step, session_log=start))
            self.started = True
        super().log(metrics, step)


def _values(module: ReplicatedRoutedExperts, record) -> torch.Tensor:
    quality = plan_quality(
        record.plan, main_E=record.main_E, cluster=module.cluster, model_dims=module.dims,
        dispatcher=module.config.dispatcher, rows_RX=record.rows_RX,
    )  # fmt: skip
    values = {**vars(quality), "plan_us": record.plan_seconds * 1e6}
    modelled = quality.modelled.as_us()
    numbers = [1.0, *(values[key] for key in MEASURES), *(modelled[key] for key in MODELLED)]
    return torch.tensor(numbers, dtype=torch.float64)
