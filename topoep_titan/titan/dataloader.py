"""Our shards behind torchtitan's data loader and tokenizer interfaces."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from data.loader import ShardLoader
from topoep_titan.titan.device import on_cpu


class ShardDataLoader(BaseDataLoader):
    """Batches of one data-parallel rank; the state is global, so it resumes on any ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        dataset_path: str = "outputs/data/demo"
        split: str = "train"
        seed: int = 0
        """Of the order of sequences."""
        infinite: bool = True
        across_documents: bool = False
        """Let the last token of a document predict the next document's first one."""
        document_mask: bool = True
        """Positions restart per document, and attention stays inside it (not on the CPU, whose
        attention has no such mask)."""
        vocab_size: int = 0
        """Of the model; filled in from it."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = None,
    ):
        self.loader = ShardLoader(
            config.dataset_path,
            config.split,
            config.seed,
            dp_rank,
            dp_world_size,
            local_batch_size,
            seq_len,
            infinite=config.infinite,
            across_documents=config.across_documents,
            document_mask=config.document_mask,
            vocab_size=config.vocab_size,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for batch in self.loader:
            inputs = {"input": torch.from_numpy(batch.inputs_BL)}
            if not on_cpu():  # positions drive the document mask, which CPU attention lacks
                inputs["positions"] = torch.from_numpy(batch.positions_BL)
            yield inputs, torch.from_numpy(batch.labels_BL)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self.loader.load_state_dict(state_dict)


class ShardTokenizer(BaseTokenizer):
    """Shards are encoded already; training needs no tokenizer."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str = ""):
        super().__init__()

    def encode(self, *args, **kwargs) -> list[int]:
        raise NotImplementedError("shards are encoded; use the tokenizer of the data set")

    def decode(self, *args, **kwargs) -> str:
        raise NotImplementedError("shards are encoded; use `python -m data.inspect`")

    def get_vocab_size(self) -> int:
        raise NotImplementedError("the vocabulary's size is the model's")
