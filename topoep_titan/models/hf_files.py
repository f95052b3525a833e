"""A folder of safetensors as one checkpoint: its tensors by name, each read only when asked for."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from topoep_titan.errors import InputError
from topoep_titan.models.family import ModelConfig
from topoep_titan.models.hf_config import mtp_layers
from topoep_titan.models.hf_names import Place, places

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHOWN = 5  # names in a message


@dataclass(frozen=True)
class HFCheckpoint:
    """Files stay open and are mapped into memory, so reading a tensor costs that tensor."""

    folder: Path
    file_of: dict[str, object]  # tensor name -> open safetensors file

    def read(self, name: str) -> Tensor:
        return self.file_of[name].get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.file_of[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        return self.file_of[name].get_slice(name).get_dtype()


def open_checkpoint(folder: Path) -> HFCheckpoint:
    """Raises InputError for a missing or damaged file, or an index that names what is not there."""
    index = folder / INDEX
    if index.exists():
        try:
            listed = json.loads(index.read_text())["weight_map"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise InputError(f"{index} is no safetensors index: {error!r}") from None
    else:
        listed = None
    names = sorted(set(listed.values())) if listed else [SINGLE]
    absent = [name for name in names if not (folder / name).exists()]
    if absent:
        remedy = f"which {INDEX} lists" if listed else f"and no {INDEX} either"
        raise InputError(f"{folder} lacks {_some(absent)}, {remedy}; copy it there")
    file_of = {}
    for name in names:
        try:
            file = safe_open(folder / name, framework="pt")
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{folder / name} is damaged or cut off ({error}); copy it again"
            ) from None
        file_of |= dict.fromkeys(file.keys(), file)
    lost = [name for name in listed or () if name not in file_of]
    if lost:
        raise InputError(f"{index} lists tensors that its files do not hold: {_some(lost)}")
    return HFCheckpoint(folder, file_of)


def match(checkpoint: HFCheckpoint, model: ModelConfig) -> tuple[dict[str, Place], list[str]]:
    """(the place of each tensor to load, the names of tensors that are rightly skipped).

    Skipped are multi-token-prediction layers and stored rotary frequencies. Raises InputError that
    names the tensors that are unknown, missing, of another shape, or of a type that is not floating
    point.
    """
    wanted = places(model)
    extra = checkpoint.file_of.keys() - wanted.keys()
    behind = range(model.n_layers, model.n_layers + mtp_layers(checkpoint.folder))
    mtp = tuple(f"model.layers.{layer}." for layer in behind)
    skipped = {
        name for name in extra if name.startswith(mtp) or name.endswith("rotary_emb.inv_freq")
    }
    unknown, missing = extra - skipped, wanted.keys() - checkpoint.file_of.keys()
    if unknown or missing:
        raise InputError(
            f"{checkpoint.folder} is not a {model.MODEL_TYPE} of this size: "
            f"unknown tensors: {_some(unknown) or 'none'}; missing: {_some(missing) or 'none'}"
        )
    for name, place in wanted.items():
        if checkpoint.dtype(name) not in DTYPES:
            raise InputError(
                f"{checkpoint.folder}: {name} is {checkpoint.dtype(name)}; "
                f"supported: {', '.join(DTYPES)}"
            )
        if checkpoint.shape(name) != place.shape:
            raise InputError(
                f"{checkpoint.folder}: {name} has shape {checkpoint.shape(name)}, "
                f"its config.json wants {place.shape}"
            )
    return wanted, sorted(skipped)


def _some(names) -> str:
    names = sorted(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
