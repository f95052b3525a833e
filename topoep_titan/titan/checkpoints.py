"""Checkpoints in logical expert order, whatever the placement: no row travels for it.

Every row of an expert parameter, or of its optimizer state, becomes a chunk of the checkpoint at
its logical id: DCP asks a tensor for its chunks through three hooks. So a checkpoint that was saved
under one placement loads under another, under none, and into the Hugging Face converters.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torchtitan.components.checkpointer import MODEL, OPTIMIZER, CheckpointManager

from topoep_titan.planning.plan import contiguous_mains
from topoep_titan.titan.expert_placement import WEIGHTS, ExpertPlacement, extent, local
from topoep_titan.titan.resume import resume_from
from topoep_titan.titan.token_order import TokenShuffle

PLACEMENT, SHUFFLE = "placement", "shuffle"


class LogicalCheckpoints(CheckpointManager):
    """torchtitan's manager; ``place`` tells it where experts are."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    placement: ExpertPlacement | None = None

    def place(self, placement: ExpertPlacement, shuffle: TokenShuffle | None) -> None:
        self.placement = placement
        if self.enable:
            self.states[PLACEMENT] = placement
            if shuffle is not None:
                self.states[SHUFFLE] = shuffle

    def dcp_save(self, state_dict: dict[str, Any], *args, to_hf: bool = False, **kwargs):
        if self.placement is not None and to_hf:
            # Hugging Face files name single experts, cut from the parameters as they lie. Only a
            # run's last save is in that format, so the rows can move back for it.
            self.placement.move(
                {
                    number: contiguous_mains(module.cluster.ranks, module.main_E.numel())
                    for number, module in self.placement.layers.items()
                }
            )
        elif self.placement is not None:
            state_dict = self._logical(state_dict)
        return super().dcp_save(state_dict, *args, to_hf=to_hf, **kwargs)

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        if self.placement is None or from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        saved = dcp.FileSystemReader(checkpoint_id).read_metadata().state_dict_metadata
        for entry in (PLACEMENT, SHUFFLE):  # absent when saved by a run without
            if not any(key.startswith(f"{entry}.") for key in saved):
                state_dict.pop(entry, None)
        dcp.load(self._logical(state_dict), checkpoint_id=checkpoint_id)  # in place
        self.states[MODEL].load_state_dict(state_dict)

    def _load(self, step: int = -1) -> bool:
        """Rank 0 decides which checkpoint is whole; all ranks load that one."""
        found = [None]
        if dist.get_rank() == 0:
            found = [resume_from(Path(self.folder), step).step]
        dist.broadcast_object_list(found)
        loaded = super()._load(-1 if found[0] is None else found[0])
        if self.placement is not None:
            self.placement.restore()
        return loaded

    def _logical(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The same tensors, with those of experts at their logical ids."""
        wrapped = {key: self._wrap(key, value) for key, value in state_dict.items()}
        if OPTIMIZER in state_dict:
            wrapped[OPTIMIZER] = _LogicalState(state_dict[OPTIMIZER], self._wrap)
        return wrapped

    def _wrap(self, key: str, value: Any) -> Any:
        for number, module in self.placement.layers.items():
            of_expert = f"layers.{number}." in key and any(w in key.split(".") for w in WEIGHTS)
            if of_expert and isinstance(value, Tensor) and value.ndim == 3:
                return LogicalRows.of(value, torch.argsort(module.main_E, stable=True))
        return value


class _LogicalState:
    """A stateful's state with experts at their logical ids."""

    def __init__(self, stateful, wrap):
        self.stateful, self.wrap = stateful, wrap

    def state_dict(self) -> dict[str, Any]:
        self.state = self.stateful.state_dict()
        return {key: self.wrap(key, value) for key, value in self.state.items()}

    def load_state_dict(self, loaded: dict[str, Any]) -> None:
        """Tensors were filled in place; everything else is new in ``loaded``."""
        self.stateful.load_state_dict(
            {
                key: self.state[key] if isinstance(value, LogicalRows) else value
                for key, value in loaded.items()
            }
        )


class LogicalRows(Tensor):
    """This rank's rows of an expert tensor, each a chunk at its logical id."""

    @staticmethod
    def of(tensor: Tensor, expert_E: Tensor) -> "LogicalRows":
        """``expert_E``: the logical expert in each row of the whole tensor."""
        part, where = local(tensor), extent(tensor)
        rows = part.as_subclass(LogicalRows)
        rows.whole = tensor.shape
        rows.columns = where.rest[: tensor.ndim - 1] or (0,) * (tensor.ndim - 1)
        experts = expert_E[where.first : where.first + where.rows].tolist()
        rows.row_of = {expert: part[i : i + 1] for i, expert in enumerate(experts)}
        return rows

    def size(self, dim: int | None = None):  # the planner compares sizes of the whole
        return self.whole if dim is None else self.whole[dim]

    def _chunk(self, expert: int) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(
            offsets=torch.Size((expert, *self.columns)), sizes=self.row_of[expert].shape
        )

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, self._chunk(expert).offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=self._chunk(expert),
                    properties=TensorProperties.create_from_tensor(row),
                    size=self.whole,
                ),
            )
            for expert, row in self.row_of.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(expert) for expert in self.row_of]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.row_of[index.offset[0]]
