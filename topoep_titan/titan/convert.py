"""Checkpoints between Hugging Face folders (safetensors) and torchtitan's (DCP), either way.

    topoep convert hf-to-titan HF_FOLDER OUT [--recipe RECIPE]
    topoep convert titan-to-hf CHECKPOINT OUT [--recipe RECIPE] [--dtype float32|bfloat16]

CHECKPOINT is a run (outputs/NAME, its last step), a step of one, or what hf-to-titan wrote. Tensors
stream: the largest parameter and one output file are in memory, never the model. What was written
is read back and compared bit for bit, then moved into place; a failure leaves nothing behind.
"""

import argparse
import contextlib
import json
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from topoep_titan.errors import InputError
from topoep_titan.models.family import ModelConfig
from topoep_titan.models.hf_config import read_hf_config, refuse_other_model, to_hf_table
from topoep_titan.models.hf_files import DTYPES, INDEX, HFCheckpoint, match, open_checkpoint
from topoep_titan.models.hf_names import Place, places
from topoep_titan.titan.job import load_job

FILE_BYTES = 4 * 2**30  # of one output file at most, unless a tensor is larger
SELECTION_BIAS = "expert_bias_E"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="topoep convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("direction", choices=("hf-to-titan", "titan-to-hf"))
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipe", type=Path, help="the model, instead of the source's own")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="titan-to-hf: cast to it")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as meant
    try:
        if options.direction == "hf-to-titan":
            if options.dtype:
                raise InputError("--dtype is of titan-to-hf; training casts what it loads")
            lines = hf_to_titan(options.source, options.out, options.recipe)
        else:
            dtype = getattr(torch, options.dtype) if options.dtype else None
            lines = titan_to_hf(options.source, options.out, options.recipe, dtype)
    except InputError as error:
        print(f"convert: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


def hf_to_titan(source: Path, out: Path, recipe: Path | None = None) -> list[str]:
    """Write the DCP checkpoint ``out``; lines that say what was done. Raises InputError."""
    model = read_hf_config(source)
    if recipe is not None:
        refuse_other_model(source, model, load_job(recipe).model)
    checkpoint = open_checkpoint(source)
    wanted, skipped = match(checkpoint, model)
    with _moved_into_place(out) as folder:
        planner = _StreamPlanner(checkpoint, wanted)
        dcp.save({}, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
        shutil.copy(source / "config.json", folder / "config.json")
        for name, parts in _by_parameter(wanted).items():
            _compare(_read_parameter(folder, name), parts, checkpoint)
    lines = [f"{out}: {len(wanted)} tensors of {model.MODEL_TYPE}, read back and equal"]
    if skipped:
        lines.append(
            f"skipped {len(skipped)} tensors of multi-token prediction or stored frequencies: "
            f"{skipped[0]} to {skipped[-1]}"
        )
    return lines


def titan_to_hf(
    source: Path, out: Path, recipe: Path | None = None, dtype: torch.dtype | None = None
) -> list[str]:
    """Write the Hugging Face folder ``out``; lines that say what was done. Raises InputError.

    ``dtype`` casts all but the selection bias, which stays float32: rounding it changes the experts
    that tokens choose.
    """
    checkpoint, model = _titan_source(source, recipe)
    wanted = places(model)
    _check_stored(checkpoint, wanted)
    parameters = _by_parameter(wanted)
    with _moved_into_place(out) as folder:
        files = _allot(parameters, _stored(checkpoint), dtype)
        names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        for name, tensors in zip(names, files):
            save_file(_collect(checkpoint, tensors, dtype), folder / name, {"format": "pt"})
        weight_map = {key: name for name, tensors in zip(names, files) for key in tensors}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        (folder / "config.json").write_text(json.dumps(to_hf_table(model), indent=1) + "\n")
        written = open_checkpoint(folder)
        match(written, read_hf_config(folder))
        for name, parts in parameters.items():
            _compare(_cast(_read_parameter(checkpoint, name), name, dtype), parts, written)
    return [f"{out}: {len(wanted)} tensors of {model.MODEL_TYPE}, read back and equal"]


class _StreamPlanner(DefaultSavePlanner):
    """Saves tensors that are read only when they are written; one chunk a published tensor."""

    def __init__(self, checkpoint: HFCheckpoint, wanted: dict[str, Place]):
        super().__init__()
        self.checkpoint = checkpoint
        self.wanted = {(p.name, p.expert or 0): (theirs, p) for theirs, p in wanted.items()}
        self.experts = {p.name: 1 + (p.expert or 0) for p in wanted.values()}  # the last is largest

    def create_local_plan(self) -> SavePlan:
        items = []
        for (name, first), (theirs, place) in self.wanted.items():
            shape, size = place.shape, place.shape
            if place.expert is not None:
                shape, size = (1, *place.shape), (self.experts[name], *place.shape)
            offsets = torch.Size([first, *[0] * (len(shape) - 1)])
            properties = TensorProperties(dtype=DTYPES[self.checkpoint.dtype(theirs)])
            chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(shape))
            data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(size))
            index = MetadataIndex(name, offsets)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, planner_data={name: (name,) for name in self.experts})
        return self.plan

    def resolve_data(self, item: WriteItem) -> Tensor:
        theirs, place = self.wanted[item.index.fqn, item.index.offset[0]]
        tensor = self.checkpoint.read(theirs)
        return tensor if place.expert is None else tensor.unsqueeze(0)


def _titan_source(source: Path, recipe: Path | None) -> tuple[Path, ModelConfig]:
    """The DCP folder, and the model that it holds."""
    if (source / "config.toml").exists():  # a run
        recipe = recipe or source / "config.toml"
        steps = {
            int(step.name.removeprefix("step-")): step
            for step in (source / "checkpoint").glob("step-*")
            if (step / ".metadata").exists()
        }
        if not steps:
            raise InputError(f"{source} has no checkpoint; train it with checkpoint.enable = true")
        source = steps[max(steps)]
    if not (source / ".metadata").exists():
        raise InputError(f"{source} is no checkpoint (no .metadata); give outputs/NAME or a step-N")
    if recipe is None and not (source / "config.json").exists():
        raise InputError(f"{source} does not say which model it holds; give --recipe RECIPE")
    return source, read_hf_config(source) if recipe is None else load_job(recipe).model


def _check_stored(checkpoint: Path, wanted: dict[str, Place]) -> None:
    stored = _stored(checkpoint)
    for name, parts in _by_parameter(wanted).items():
        place = next(iter(parts.values()))
        size = place.shape if place.expert is None else (len(parts), *place.shape)
        if name not in stored or tuple(stored[name].size) != size:
            there = f"has shape {tuple(stored[name].size)}" if name in stored else "is missing"
            raise InputError(f"{checkpoint}: {name} {there}, the model wants {size}")
    named = {place.name for place in wanted.values()}
    for name in stored:
        homeless = name.endswith(f".{SELECTION_BIAS}") and name not in named
        if (
            homeless
            and not name.startswith("optimizer")
            and _read_parameter(checkpoint, name).any()
        ):
            raise InputError(
                f"{checkpoint}: {name} was trained (model.balance = 'bias'), and the published "
                "format has no selection bias: the export would choose other experts"
            )


def _stored(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    entries = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {
        name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
    }


def _read_parameter(checkpoint: Path, name: str) -> Tensor:
    reader = FileSystemReader(checkpoint)
    entry = reader.read_metadata().state_dict_metadata[name]
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    try:
        dcp.load({name: tensor}, storage_reader=reader, no_dist=True)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise InputError(f"{checkpoint}: {name} cannot be read: {error}") from None
    return tensor


def _by_parameter(wanted: dict[str, Place]) -> dict[str, dict[str, Place]]:
    """Our parameter name -> its published tensors, experts in ascending order."""
    grouped: dict[str, dict[str, Place]] = {}
    for theirs, place in wanted.items():
        grouped.setdefault(place.name, {})[theirs] = place
    return grouped


def _allot(parameters, stored, dtype: torch.dtype | None) -> list[dict[str, Place]]:
    """Published tensors by output file, in our parameters' order."""
    files, size = [{}], 0
    for name, parts in parameters.items():
        kind = torch.float32 if name.endswith(SELECTION_BIAS) else dtype
        item = (kind or stored[name].properties.dtype).itemsize
        for theirs, place in parts.items():
            more = item * torch.Size(place.shape).numel()
            if files[-1] and size + more > FILE_BYTES:
                files.append({})
                size = 0
            files[-1][theirs] = place
            size += more
    return files


def _collect(checkpoint: Path, tensors: dict[str, Place], dtype) -> dict[str, Tensor]:
    """The tensors of one output file; a parameter of all experts is read once for it."""
    collected, name, parameter = {}, None, None
    for theirs, place in tensors.items():
        if place.name != name:
            name = place.name
            parameter = _cast(_read_parameter(checkpoint, name), name, dtype)
        part = parameter if place.expert is None else parameter[place.expert]
        collected[theirs] = part.clone()
    return collected


def _cast(tensor: Tensor, name: str, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or name.endswith(SELECTION_BIAS) else tensor.to(dtype)


def _compare(parameter: Tensor, parts: dict[str, Place], published: HFCheckpoint) -> None:
    for theirs, place in parts.items():
        ours = parameter if place.expert is None else parameter[place.expert]
        if not _same_bits(published.read(theirs), ours):
            raise InputError(
                f"{theirs} reads back with other values than were written; "
                "the disk or one of the files is damaged"
            )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (one, other)))


@contextlib.contextmanager
def _moved_into_place(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` that becomes it when all went well, and is removed otherwise."""
    if out.exists():
        raise InputError(f"{out} exists; choose another folder, or remove it")
    folder = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.mkdir(parents=True)
    try:
        yield folder
        folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
