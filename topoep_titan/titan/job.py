"""A recipe (TOML) to a complete training job: base by name, strict merge, command line on top."""

import contextlib
import dataclasses
import io
from pathlib import Path
from typing import Any

import tomli
import tyro
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.components.validate import Validator
from torchtitan.config import CommConfig, DebugConfig, TrainingConfig
from torchtitan.config.manager import ConfigManager, custom_registry

from topoep_titan.errors import InputError
from topoep_titan.models import MODELS
from topoep_titan.titan.arguments import refusal
from topoep_titan.titan.checkpoints import LogicalCheckpoints
from topoep_titan.titan.config import AdamW, expert_settings
from topoep_titan.titan.dataloader import ShardDataLoader, ShardTokenizer
from topoep_titan.titan.device import on_cpu
from topoep_titan.titan.float8 import use_float8
from topoep_titan.titan.init import make_layout_invariant
from topoep_titan.titan.merge import as_table, merge
from topoep_titan.titan.metrics import PlanMetrics
from topoep_titan.titan.profiler import LaneProfiler
from topoep_titan.titan.routing import skew_routers
from topoep_titan.titan.shuffle import shuffle_blocks
from topoep_titan.titan.trainer import TopoEPTrainer

# Follows from the rest in `complete`, so neither a recipe nor config.toml says it.
DERIVED = frozenset(
    {
        "dump_folder",
        "hf_assets_path",
        "loss",
        "tokenizer",
        "model_spec",
        "optimizer.param_groups",
        "metrics.num_layers",
        "dataloader.vocab_size",
        "validator.dataloader",
    }
)


def load_job(recipe: Path, arguments: list[str] = ()) -> TopoEPTrainer.Config:
    """The job of a recipe with ``--section.key value`` arguments on top, not yet completed.

    Raises InputError for anything wrong in the recipe or the arguments.
    """
    table = read_recipe(recipe)
    config = merge(base_config(table.pop("base"), recipe.stem), table)
    if arguments:
        ConfigManager.register_tyro_rules(custom_registry)
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                config = tyro.cli(
                    type(config), args=list(arguments), default=config, registry=custom_registry
                )
        except (ValueError, AssertionError) as error:
            raise InputError(f"command line: {error}") from None
        except SystemExit as end:
            if not end.code:  # --help
                raise
            raise InputError(
                f"command line: {refusal(config, arguments, said.getvalue())}"
            ) from None
    return config


def resolved_table(config: TopoEPTrainer.Config) -> dict[str, Any]:
    """Everything that defines the run, as a recipe that builds it again."""
    return as_table(config, leave_out=DERIVED)


def complete(config: TopoEPTrainer.Config, folder: Path) -> TopoEPTrainer.Config:
    """Build the model spec and everything else that follows from the recipe's values."""
    spec = config.model.build_spec(config.base)
    if "float8" in config.converters:
        use_float8(spec.model)
    make_layout_invariant(spec.model, seed=config.debug.seed or 0)
    if config.shuffle.enabled:
        shuffle_blocks(spec.model.layers, config.shuffle.residual)
    topoep = config.topoep
    if topoep.router_skew is not None:
        skew_routers(spec.model, topoep.router_skew, seed=config.debug.seed or 0)
    dataloader = dataclasses.replace(config.dataloader, vocab_size=config.model.vocab_size)
    validation = dataclasses.replace(dataloader, split="validation")
    return dataclasses.replace(
        config,
        model_spec=spec,
        dump_folder=str(folder),
        dataloader=dataloader,
        validator=dataclasses.replace(config.validator, dataloader=validation),
        loss=CrossEntropyLoss.Config(global_vocab_size=config.model.vocab_size),
        metrics=dataclasses.replace(config.metrics, num_layers=config.model.n_layers),
        override=dataclasses.replace(
            config.override,
            imports=[
                *config.override.imports,
                (
                    "topoep_titan.titan.routed_experts.replicated",
                    expert_settings(topoep, config.converters),
                ),
            ],
        ),
    )


def read_recipe(path: Path, *, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The recipe's tables laid over those of the recipe that it ``extends`` (a path beside it)."""
    path = path.resolve()
    if path in seen:
        raise InputError(f"recipes extend each other in a circle: {' -> '.join(map(str, seen))}")
    try:
        table = tomli.loads(path.read_text())
    except OSError as error:
        raise InputError(f"recipe {path} cannot be read: {error.strerror}") from None
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"recipe {path} is not TOML: {error}") from None
    if "extends" in table:
        parent = table.pop("extends")
        if not isinstance(parent, str):
            raise InputError(f"recipe {path}: extends is {parent!r}; give the path of one recipe")
        table = _laid_over(read_recipe(path.parent / parent, seen=(*seen, path)), table)
    base = table.get("base")
    if not isinstance(base, str) or base not in MODELS:
        raise InputError(f"recipe {path}: base is {base!r}; choose one of: {', '.join(MODELS)}")
    return table


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: _laid_over(below[key], above[key])
        for key in below.keys() & above.keys()
        if isinstance(below[key], dict) and isinstance(above[key], dict)
    }
    return {**below, **above, **both}


def base_config(base: str, recipe: str) -> TopoEPTrainer.Config:
    """Defaults of every recipe. What a recipe does not say is this, or torchtitan's default."""
    return TopoEPTrainer.Config(
        base=base,
        recipe=recipe,
        model=MODELS[base](),
        hf_assets_path="",
        tokenizer=ShardTokenizer.Config(),
        dataloader=ShardDataLoader.Config(),
        loss=CrossEntropyLoss.Config(),
        metrics=PlanMetrics.Config(
            log_freq=1, enable_tensorboard=True, disable_color_printing=on_cpu()
        ),
        optimizer=AdamW.Config(),
        lr_scheduler=LRSchedulersContainer.Config(),
        # Plain all-to-all reads its split sizes on the host, which CUDA graphs do not allow.
        training=TrainingConfig(disable_cuda_graphs=True),
        checkpoint=LogicalCheckpoints.Config(
            last_save_model_only=False, initial_load_model_only=False
        ),
        activation_checkpoint=None,
        profiler=LaneProfiler.Config(),
        validator=Validator.Config(dataloader=ShardDataLoader.Config()),
        comm=CommConfig(trace_buf_size=0) if on_cpu() else CommConfig(),
        debug=DebugConfig(seed=0, enable_structured_logging=False),
    )
