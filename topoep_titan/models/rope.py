"""Rotary embeddings of the published models where torchtitan's do not cover them.

Both take queries and keys (batch, sequence, heads, head width), as torchtitan's do. ``amplitude``
multiplies cosine and sine: transformers' attention factor of YaRN.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE


class HalfSplitRoPE(CosSinRoPE):
    """Rotates the first ``dim`` dimensions, pairing i with i + dim/2, and passes on the rest.

    GLM-4.5 rotates half of each head (``partial_rotary_factor`` 0.5), Qwen3 all of it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        amplitude: float = 1.0

    def _precompute_cache(self) -> Tensor:
        return super()._precompute_cache() * self.config.amplitude

    def forward(
        self, query: Tensor, key: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        dim = self.config.dim
        if dim == query.shape[-1]:
            return super().forward(query, key, positions)
        rotated = super().forward(query[..., :dim], key[..., :dim], positions)
        query, key = (
            torch.cat([turned, whole[..., dim:]], dim=-1)
            for turned, whole in zip(rotated, (query, key))
        )
        return query, key


class InterleavedRoPE(ComplexRoPE):
    """Pairs neighbours (2i, 2i + 1), as DeepSeek-V2 does."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        amplitude: float = 1.0

    def _precompute_cache(self) -> Tensor:
        return super()._precompute_cache() * self.config.amplitude
