"""Batches out of shards: any sample by its global number, exact resume on any number of ranks.

The stream of samples is one and the same for every layout: sample s of the run is sequence
``shuffled(s mod n)`` of epoch ``s // n``. A global batch takes the next world * batch_size samples;
rank r has the r-th run of batch_size of them. So the state is one integer, the same on all ranks,
and a run that resumes on other ranks with the same global batch sees the same batches.

A sequence is a window of pairs (data/pack.py): inputs and labels as torchtitan's own text dataset
makes them, no label crossing from one document to the next.

Letters: B sequences of one rank's batch, L pairs of a sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.errors import DataError
from data.order import shuffled
from data.pack import PADDING, pair_starts, places
from data.shards import open_shards, sequences_in

IGNORED = -100  # label of padding: torch's ignore_index


@dataclass(frozen=True)
class Batch:
    """int64 (B, L) each. ``labels``: the next token of the same document, or IGNORED."""

    inputs_BL: np.ndarray
    labels_BL: np.ndarray
    positions_BL: np.ndarray  # restart at 0 with each document (option) and each sequence


class ShardLoader:
    """Iterates the batches of one rank, for ever or (``infinite=False``) for one pass.

    One pass drops the last samples that do not fill a global batch, so that all ranks see the same
    number of batches; every ``iter()`` starts a new pass, unless a state was just loaded.
    Raises DataError for a missing or damaged set, ids beyond ``vocab_size``, a sequence length
    that leaves no window, and a pass without a single global batch.
    """

    def __init__(
        self,
        directory,
        split: str,
        seed: int,
        rank: int,
        world: int,
        batch_size: int,
        seq_len: int,
        *,
        infinite: bool = True,
        across_documents: bool = False,  # the EOS predicts the next document, as a flat stream does
        document_mask: bool = True,  # positions restart per document: torchtitan masks by them
        vocab_size: int | None = None,  # of the model; the shards' largest id must fit
    ):
        for name, value in (("world", world), ("batch_size", batch_size), ("seq_len", seq_len)):
            if value < 1:
                raise DataError(f"{name} is {value}; give at least 1")
        if not 0 <= rank < world:
            raise DataError(f"rank is {rank}; {world} ranks are 0 to {world - 1}")
        self.shards = open_shards(directory, split, vocab_size=vocab_size)
        self.split, self.seed, self.seq_len = split, seed, seq_len
        self.rank, self.world, self.batch_size = rank, world, batch_size
        self.infinite, self.document_mask = infinite, document_mask
        self.across_documents = across_documents
        if across_documents and any(shard.padding for shard in self.shards.manifest.shards):
            raise DataError(
                f"{directory} is packed by best_fit, whose windows hold whole documents; read it "
                "with across_documents = false"
            )
        self._first = self.shards.first if across_documents else map(pair_starts, self.shards.first)
        self._first = list(self._first)
        self.samples = 0  # consumed by all ranks together
        self._loaded = False
        sequences = [
            (tokens.size - 1) // seq_len
            if across_documents
            else sequences_in(tokens.size, first_D.size, seq_len)
            for tokens, first_D in zip(self.shards.tokens, self.shards.first)
        ]
        self._first_sequence = np.cumsum([0, *sequences])
        self.sequences = int(self._first_sequence[-1])
        if self.sequences == 0:
            longest = max(
                tokens.size - (1 if across_documents else first_D.size)
                for tokens, first_D in zip(self.shards.tokens, self.shards.first)
            )
            raise DataError(
                f"seq_len {seq_len} leaves no window in split {split!r} of {directory}, whose "
                f"longest shard has {longest:,} pairs of tokens; take at most that"
            )
        if not infinite and self.sequences < self.global_batch:
            raise DataError(
                f"one pass over split {split!r} of {directory} has {self.sequences} sequences of "
                f"{seq_len}, less than a global batch of {world} x {batch_size}; lower batch_size"
            )

    @property
    def global_batch(self) -> int:
        return self.world * self.batch_size

    def __len__(self) -> int:
        """Batches of one pass."""
        return self.sequences // self.global_batch

    def __iter__(self) -> Iterator[Batch]:
        if not self.infinite and not self._loaded:
            self.samples = 0
        self._loaded = False
        while self.infinite or self.samples + self.global_batch <= self.sequences:
            first = self.samples + self.rank * self.batch_size
            batch = self._batch(self._sequences_of(np.arange(first, first + self.batch_size)))
            self.samples += self.global_batch  # before the yield: the state counts this batch
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank."""
        return {
            "manifest_sha256": self.shards.manifest.sha256,
            "split": self.split,
            "seq_len": self.seq_len,
            "across_documents": self.across_documents,
            "seed": self.seed,
            "epoch": self.samples // self.sequences,
            "samples": self.samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` stopped, on any number of ranks.

        Raises DataError when the state belongs to another data set, split, length or seed.
        """
        own = self.state_dict()
        for key in own:
            if key not in state:
                raise DataError(f"the loader's state lacks {key!r}; it is not one of this program")
            if key not in ("epoch", "samples") and state[key] != own[key]:
                raise DataError(
                    f"the checkpoint was trained with {key} {state[key]!r}, this run has "
                    f"{own[key]!r} ({self.shards.directory}); resume with the same data and "
                    "settings, or start a new run"
                )
        self.samples, self._loaded = state["samples"], True

    def _sequences_of(self, sample_B: np.ndarray) -> np.ndarray:
        """int64 (B,): sequence number of each global sample."""
        sequence_B = np.empty_like(sample_B)
        epoch_B, index_B = np.divmod(sample_B, self.sequences)
        for epoch in np.unique(epoch_B):  # a batch may cross an epoch
            here = epoch_B == epoch
            sequence_B[here] = shuffled(index_B[here], self.sequences, self.seed, int(epoch))
        return sequence_B

    def _batch(self, sequence_B: np.ndarray) -> Batch:
        shape = (sequence_B.size, self.seq_len)
        inputs_BL, labels_BL, positions_BL = (np.empty(shape, dtype=np.int64) for _ in range(3))
        shard_B = np.searchsorted(self._first_sequence, sequence_B, side="right") - 1
        for row, (sequence, shard) in enumerate(zip(sequence_B, shard_B)):
            start = int(sequence - self._first_sequence[shard]) * self.seq_len
            document_L, positions_L = places(self._first[shard], start, self.seq_len)
            place_L = np.arange(start, start + self.seq_len)
            if not self.across_documents:
                place_L += document_L  # each document before has one pair less than tokens
            low = place_L[0]
            piece = self.shards.tokens[shard][low : place_L[-1] + 2].astype(np.int64)
            inputs_BL[row], labels_BL[row] = piece[place_L - low], piece[place_L - low + 1]
            labels_BL[row][self.shards.source[shard][document_L] == PADDING] = IGNORED
            positions_BL[row] = positions_L if self.document_mask else np.arange(self.seq_len)
        return Batch(inputs_BL, labels_BL, positions_BL)
