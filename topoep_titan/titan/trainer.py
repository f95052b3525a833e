"""torchtitan's Trainer with our tables in its config, and a RunResult at the end."""

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torchtitan.trainer import Trainer

from topoep_titan.models.family import ModelConfig
from topoep_titan.models.router import connect_routers
from topoep_titan.results import RunResult, provenance, write_result
from topoep_titan.titan.config import TopoEPConfig
from topoep_titan.titan.device import local_ranks
from topoep_titan.titan.expert_placement import ExpertPlacement, PlacementConfig
from topoep_titan.titan.run_folder import RESULT, read_config
from topoep_titan.titan.shuffle import ShuffleConfig, connect_blocks
from topoep_titan.titan.trace import write_trace


class TopoEPTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        base: str
        """The flavour that the recipe builds on."""

        recipe: str
        """Name of the recipe, for reports."""

        nproc: int = 1
        """Processes of the whole job; `--check` validates the layout for it."""

        model: ModelConfig
        """Of the flavour's family; its fields are that family's."""

        converters: list[Literal["float8", "float8_experts"]] = field(default_factory=list)
        """Low precision: "float8" for the linears of attention and dense feed-forward,
        "float8_experts" for the routed experts."""

        topoep: TopoEPConfig = field(default_factory=TopoEPConfig)

        placement: PlacementConfig = field(default_factory=PlacementConfig)

        shuffle: ShuffleConfig = field(default_factory=ShuffleConfig)

    def __init__(self, config: Config):
        super().__init__(config)
        tokens_per_step = (
            self.gradient_accumulation_steps
            * self.config.training.local_batch_size
            * self.config.training.seq_len
            * self.parallel_dims.dp_replicate
            * self.parallel_dims.dp_shard
        )
        self.metrics_processor.tokens_per_step = tokens_per_step
        if config.converters:  # torchtitan knows its own float8 layers only; MFU then has no peak
            self.metrics_processor.has_quantization = True
        connect_routers(self.model_parts, self.parallel_dims, tokens_per_step=tokens_per_step)
        self.placement = self.shuffle = None
        if config.placement.strategy == "correlated":
            self._place(tokens_per_step)

    def _place(self, tokens_per_step: int) -> None:
        config, microbatches = self.config.placement, self._microbatches()
        self.placement = ExpertPlacement(
            config,
            self.model_parts,
            self.optimizers,
            microbatches=microbatches,
            tokens=tokens_per_step // microbatches // self._token_ranks(),
        )
        if self.config.shuffle.enabled:
            mesh = self.parallel_dims.get_mesh("tp")
            size = -(-config.sample_tokens * mesh.size() // self._token_ranks())
            self.shuffle = connect_blocks(self.model_parts, mesh.get_group(), size)
        self.checkpointer.place(self.placement, self.shuffle)

    def train_step(self, data_iterator) -> None:
        self.metrics_processor.begin_step(self.step)
        super().train_step(data_iterator)
        steps_left = self.config.training.steps - self.step
        if self.placement and steps_left and self.step % self.config.placement.refresh_steps == 0:
            self.metrics_processor.note(self.step, self.placement.refresh(steps_left))
            if self.shuffle:
                self.shuffle.refit()
        if self.config.topoep.record_trace:
            folder = Path(self.config.dump_folder)
            write_trace(self.model_parts, folder, self.step, microbatches=self._microbatches())

    def _microbatches(self) -> int:
        """Calls of a layer in one step."""
        return self.gradient_accumulation_steps * self.num_pipeline_parallel_microbatches

    def _token_ranks(self) -> int:
        """Ranks that share a step's tokens in an MoE layer: all of a pipeline stage."""
        return self.parallel_dims.world_size // self.parallel_dims.pp

    def should_continue_training(self) -> bool:
        more = super().should_continue_training()
        if not more:  # at once: a rank that dies while it waits to exit must not cost the result
            self.write_result()
        return more

    def write_result(self) -> None:
        """``result.json`` of the finished run, by the rank that writes metrics."""
        if not self.metrics_processor.writes:
            return
        steps, validation = self.metrics_processor.step_log.read()
        modelled = [step.pop("modelled_us") for step in steps]
        skew = self.config.topoep.router_skew
        folder = Path(self.config.dump_folder)
        origin = provenance()
        machines = self.parallel_dims.world_size // (local_ranks() or 1)
        write_result(
            RunResult(
                kind="measured",
                recipe=self.config.recipe,
                planner=self.config.topoep.planner,
                dispatcher=self.config.topoep.dispatcher,
                routing="natural" if skew is None else f"skew {skew:g}",
                ranks=self.parallel_dims.world_size,
                steps=steps,
                name=folder.name,
                validation=[
                    {"step": record["step"], "loss": record["validation_loss"]}
                    for record in validation
                ],
                modelled_us={
                    key: statistics.fmean(record[key] for record in modelled) for key in modelled[0]
                },
                measured_us={
                    "step": statistics.median(step["seconds"] for step in steps) * 1e6,
                    "plan": statistics.median(step["plan_us"] for step in steps),
                },
                config=read_config(folder),
                **origin | {"hardware": origin["hardware"] | {"machines": machines}},
            ),
            folder / RESULT,
        )
