"""The ``coupled`` workload: routing with planted co-selection and cross-layer structure.

Trained routers are not independent draws: some expert pairs are chosen together far too often, and
a token's experts in one layer foretell those of the next (Expert Coupling, sections on intra- and
cross-layer structure). This generator plants both, so that placement, shuffling and row
deduplication have something to find. How a token is drawn:

- Experts of a layer form equal communities, relabelled in every layer, so that contiguous ids mean
  nothing. A token *type* owns a few *core* experts of its community in every layer.
- Documents prefer a community; a type is drawn inside it. From layer to layer a token mostly keeps
  its type, else takes another of its community, else starts afresh from its document.
- A *structured* token adds bonuses to the logits of its community and of its core, every other
  token follows the experts' popularity alone. Top-k of logits plus Gumbel noise.

TOP2 and TOP6 were fitted to the statistics that the Expert Coupling text gives for its models.
``PRESETS`` names them, TOP6's structure at top-8, and top-8 with hot experts: ``hotN`` has the
smallest ``load_sigma``, in steps of 0.05, whose hottest expert takes N times the mean load.

Letters: L layers, T tokens, K top-k, E experts, C communities, Z types, N core experts of a type.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from topoep_titan.errors import InputError

BLOCK = 16384  # tokens whose logits are in memory at once
MOST_DRAWN = 2**33  # logits of one draw: minutes


@dataclass(frozen=True)
class Coupling:
    experts: int
    top_k: int
    types: int
    communities: int
    core: int  # experts of a type
    core_bonus: float  # on the logits of the type's core experts
    community_bonus: float  # on the logits of its community's experts
    structured: float  # share of tokens that feel the bonuses
    stay_structured: float  # chance to keep that bit into the next layer
    same_type: float  # chance to keep the type into the next layer
    same_community: float  # else, chance to stay in the community
    type_sigma: float  # log-normal spread of the popularity of types and communities
    load_sigma: float  # normal spread of the experts' own logits
    document_share: float  # chance to follow the document's community
    spilled: int = 0  # core experts that sit in another community: clusters then overlap
    document: int = 512  # tokens


TOP2 = Coupling(
    experts=128, top_k=2, types=64, communities=32, core=2, core_bonus=4.4, community_bonus=1.9,
    structured=0.63, stay_structured=1.0, same_type=0.99, same_community=0.75, type_sigma=0.55,
    load_sigma=0.25, document_share=0.05,
)  # fmt: skip
TOP6 = Coupling(
    experts=128, top_k=6, types=64, communities=16, core=8, core_bonus=7.5, community_bonus=2.8,
    structured=0.57, stay_structured=0.3, same_type=0.97, same_community=0.4, type_sigma=0.38,
    load_sigma=0.48, document_share=0.05,
)  # fmt: skip


def coupling_for(experts: int, top_k: int, *, hard: bool = False) -> Coupling:
    """TOP2 or TOP6 as fitted at 128 experts, otherwise the nearer of the two scaled to the shape.

    ``hard`` puts half of every core into another community. Raises InputError when the experts do
    not divide into equal communities that hold a core.
    """
    fitted = TOP2 if top_k == 2 else TOP6
    if (experts, top_k) == (fitted.experts, fitted.top_k) and not hard:
        return fitted
    factor = experts / fitted.experts
    communities = max(1, round(fitted.communities * factor))
    core = fitted.core if top_k <= 2 else top_k
    if top_k > experts or experts % communities or core > experts // communities:
        raise InputError(
            f"{experts} experts with top-k {top_k} do not form {communities} equal communities of "
            f"at least {core}; give a multiple of 16 experts, enough for the top-k"
        )
    return replace(
        fitted, experts=experts, top_k=top_k, core=core, communities=communities,
        types=max(communities, round(fitted.types * factor / communities) * communities),
        spilled=top_k // 2 if hard else 0,
    )  # fmt: skip


PRESETS = {
    "top2": TOP2,
    "top6": TOP6,
    "top8": coupling_for(128, 8),
    "hot5": replace(coupling_for(128, 8), load_sigma=1.3),
    "hot8": replace(coupling_for(128, 8), load_sigma=2.05),
    "hot10": replace(coupling_for(128, 8), load_sigma=2.5),
}


def coupled(
    coupling: Coupling, *, layers: int, tokens: int, seed: int, world_seed: int = 1
) -> Tensor:
    """int16 (L, T, K): the same tokens through all layers, ids by falling logit.

    ``world_seed`` fixes communities, cores and popularities, ``seed`` draws the tokens: two seeds
    are two samples of one router.
    """
    check_draw(layers, tokens, coupling.experts)
    world = _World(coupling, layers, np.random.default_rng(world_seed))
    rng = np.random.default_rng([seed, 7])
    documents = -(-tokens // coupling.document)
    preferred_T = rng.choice(coupling.communities, documents, p=world.community_share_C)
    preferred_T = np.repeat(preferred_T, coupling.document)[:tokens]

    def fresh_type() -> np.ndarray:
        follows_T = rng.random(tokens) < coupling.document_share
        other_T = rng.choice(coupling.communities, tokens, p=world.community_share_C)
        return world.type_of(np.where(follows_T, preferred_T, other_T), rng)

    type_T, structured_T = fresh_type(), np.zeros(tokens, dtype=bool)
    ids_LTK = np.empty((layers, tokens, coupling.top_k), dtype=np.int16)
    for layer in range(layers):
        if layer:
            u_T = rng.random(tokens)
            sibling_T, fresh_T = world.type_of(type_T % coupling.communities, rng), fresh_type()
            leave = coupling.same_type + (1 - coupling.same_type) * coupling.same_community
            moved_T = np.where(u_T < leave, sibling_T, fresh_T)
            type_T = np.where(u_T < coupling.same_type, type_T, moved_T)
        drawn_T = rng.random(tokens) < coupling.structured
        if layer:
            keeps_T = rng.random(tokens) < coupling.stay_structured
            drawn_T = np.where(keeps_T, structured_T, drawn_T)
        structured_T = drawn_T
        for start in range(0, tokens, BLOCK):
            block = slice(start, start + BLOCK)
            ids_LTK[layer, block] = world.route(layer, type_T[block], structured_T[block], rng)
    return torch.from_numpy(ids_LTK)


def check_draw(layers: int, tokens: int, experts: int) -> None:
    """Raise InputError for a draw that would take hours."""
    if layers * tokens * experts > MOST_DRAWN:
        raise InputError(
            f"{layers} layers of {tokens} tokens with {experts} experts are too many to draw; "
            f"layers x tokens x experts go up to {MOST_DRAWN}"
        )


class _World:
    """What stays fixed while tokens are drawn: communities, cores, popularities."""

    def __init__(self, coupling: Coupling, layers: int, rng: np.random.Generator):
        self.coupling = coupling
        experts, communities = coupling.experts, coupling.communities
        self.bias_LE = rng.normal(0, coupling.load_sigma, (layers, experts)).astype(np.float32)
        self.community_LE = np.empty((layers, experts), dtype=np.int32)
        self.core_LZN = np.empty((layers, coupling.types, coupling.core), dtype=np.int64)
        for layer in range(layers):
            members_C = rng.permutation(experts).reshape(communities, -1)
            self.community_LE[layer, members_C.ravel()] = np.repeat(
                np.arange(communities), members_C.shape[1]
            )
            for community, members in enumerate(members_C):
                self._deal_cores(self.core_LZN[layer, community::communities], members, rng)
            self._spill(self.core_LZN[layer], members_C, rng)
        share_C = np.exp(rng.normal(0, coupling.type_sigma, communities))
        self.community_share_C = share_C / share_C.sum()
        # Types of community c are c, c + C, c + 2C, ...: column c of this table.
        weight = np.exp(rng.normal(0, coupling.type_sigma, coupling.types)).reshape(-1, communities)
        self.cumulative_type_share = np.cumsum(weight / weight.sum(0), axis=0)

    @staticmethod
    def _deal_cores(core_ZN: np.ndarray, members: np.ndarray, rng: np.random.Generator) -> None:
        """The types of one community share out its experts; a new deck when they run out."""
        deck = members[:0]
        for core in core_ZN:
            if len(deck) < len(core):
                fresh = rng.permutation(members)
                deck = np.concatenate([deck, fresh[~np.isin(fresh, deck)]])
            core[:], deck = deck[: len(core)], deck[len(core) :]

    def _spill(self, core_ZN: np.ndarray, members_C: np.ndarray, rng: np.random.Generator) -> None:
        """Replace the first ``spilled`` core experts of a type by some of one other community."""
        if not self.coupling.spilled:
            return
        communities = len(members_C)
        for z, core in enumerate(core_ZN):
            other = (z % communities + 1 + rng.integers(communities - 1)) % communities
            core[: self.coupling.spilled] = rng.choice(
                members_C[other], self.coupling.spilled, replace=False
            )

    def type_of(self, community_T: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A type of each token's community, by popularity."""
        u_T = rng.random(len(community_T))
        row_T = (u_T[:, None] > self.cumulative_type_share[:, community_T].T).sum(1)
        row_T = row_T.clip(max=len(self.cumulative_type_share) - 1)  # the last sum may be below 1
        return row_T * self.coupling.communities + community_T

    def route(
        self, layer: int, type_T: np.ndarray, structured_T: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """(T, K) ids of one block of tokens."""
        bonus_T = structured_T.astype(np.float32)[:, None]
        community_T = type_T % self.coupling.communities
        in_community_TE = self.community_LE[layer] == community_T[:, None]
        logits_TE = self.bias_LE[layer] + self.coupling.community_bonus * bonus_T * in_community_TE
        rows = np.arange(len(type_T))[:, None]
        logits_TE[rows, self.core_LZN[layer, type_T]] += self.coupling.core_bonus * bonus_T
        uniform_TE = rng.random(logits_TE.shape, dtype=np.float32)
        logits_TE -= np.log(-np.log(uniform_TE + 1e-12) + 1e-12)  # Gumbel noise
        return np.argsort(-logits_TE, axis=1, kind="stable")[:, : self.coupling.top_k]
