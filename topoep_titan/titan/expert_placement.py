"""Correlated expert placement in training: sample, solve, move; mathematically invisible.

Router, bias, counters and auxiliary losses stay in logical ids, so routing is untouched bit for
bit. Only the rows of the routed experts' parameters and of their optimizer state move, between
steps: expert x is row ``position_of(main_E)[x]`` of the parameter that all ranks hold together.
Checkpoints hold logical order (``checkpoints``). Letters: E experts, N sampled tokens, K top-k.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchtitan.tools.logging import logger

from topoep_titan.placement.native import place
from topoep_titan.placement.quality import placement_quality
from topoep_titan.placement.refresh import (
    layer_seconds,
    move_seconds,
    position_of,
    relabelled,
)
from topoep_titan.placement.sets import BALANCE_WEIGHT
from topoep_titan.placement.statistics import SetSample
from topoep_titan.titan.routed_experts import routed_layers

WEIGHTS = ("w1_EFD", "w2_EDF", "w3_EFD")


@dataclass(kw_only=True, slots=True)
class PlacementConfig:
    strategy: Literal["contiguous", "correlated"] = "contiguous"
    """Where experts live: by id, or with those that serve the same tokens (needs a deduplicating
    dispatcher, whose rows that saves)."""

    refresh_steps: int = 500
    """Steps between refreshes; experts move only when the modelled saving until the next one pays
    for the move."""

    sample_tokens: int = 8192
    """Expert sets that a refresh solves on, a few from every microbatch of every rank."""

    balance_weight: int = BALANCE_WEIGHT
    """Per cent of a row per token that a mean squared relative deviation of the ranks' loads of 1
    costs. On drawn routing 50 to 200 remove the same rows, and 200 spreads hot experts."""

    node_weight: int | None = None
    """Rows that one distinct node of a token weighs. Default: bw_near / bw_far of the cluster."""


@dataclass(frozen=True)
class Decision:
    """Of one layer: where its experts would live, and what the cost model says to that."""

    main_E: Tensor | None  # the new placement; None: experts stay
    experts: int  # that would move
    rows: float  # a token of the sample, as placed now
    fewer: float  # a token, as they would be placed
    saving: float  # modelled seconds until the next refresh
    cost: float  # modelled seconds of the move

    def __str__(self) -> str:
        return (
            f"{self.rows:.2f} rows a token, {self.fewer:.2f} if {self.experts} experts move; "
            f"modelled saving {self.saving:.3g} s, cost {self.cost:.3g} s: "
            f"they {'stay' if self.main_E is None else 'move'}"
        )


class ExpertPlacement:
    """Of all layers of this rank. Every method is collective over all ranks."""

    def __init__(
        self,
        config: PlacementConfig,
        model_parts: list[nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        microbatches: int,
        tokens: int,
    ):
        """``microbatches``: calls of a layer in one step; ``tokens``: of one rank in one call."""
        self.config, self.microbatches, self.tokens = config, microbatches, tokens
        self.optimizers = list(optimizers)
        self.layers = dict(routed_layers(model_parts))
        per_rank = -(-config.sample_tokens // dist.get_world_size())
        calls = max(1, config.refresh_steps * microbatches)
        for number, module in self.layers.items():
            seed = number * dist.get_world_size() + dist.get_rank()
            module.keep_sample(SetSample(per_rank, -(-per_rank // calls), seed))
        self.loaded: dict[int, Tensor] = {}

    def refresh(self, steps_left: int) -> str:
        """Solve every layer on what was sampled, and move the layers for which it pays.

        Returns one line about it. Layers are dealt out to the ranks; what a rank decides of its
        layers, all are told.
        """
        started = time.perf_counter()
        mine = {
            number: (module.sample.drain(), module.load_E if module.transport.rank == 0 else None)
            for number, module in self.layers.items()
        }
        for module in self.layers.values():
            module.load_E = torch.zeros_like(module.load_E)
        everyone = _gather(mine)
        decided = {}
        for index, number in enumerate(sorted(set().union(*everyone))):
            holders = [rank for rank, parts in enumerate(everyone) if number in parts]
            if holders[index % len(holders)] == dist.get_rank():
                sets = [parts[number][0] for parts in everyone if number in parts]
                loads = [parts[number][1] for parts in everyone if number in parts]
                decided[number] = self._decide(number, sets, loads, steps_left)
        told = {number: decision for part in _gather(decided) for number, decision in part.items()}
        for number in sorted(told):
            logger.info(f"Layer {number}: {told[number] or 'nothing was sampled'}")
        moves = {number: decision for number, decision in told.items() if decision}
        moves = {n: decision for n, decision in moves.items() if decision.main_E is not None}
        self.move({number: decision.main_E for number, decision in moves.items()})
        return _told(list(moves.values()), len(told), time.perf_counter() - started)

    def _decide(
        self, number: int, sets: list[Tensor], loads: list[Tensor | None], steps_left: int
    ) -> Decision | None:
        """None when nothing was sampled."""
        module, config = self.layers[number], self.config
        cluster, old_E = module.cluster, module.main_E
        per_node = cluster.ranks_per_node
        ids_NK = torch.cat([part for part in sets if len(part)] or sets)
        if not len(ids_NK):
            return None
        ratio = max(1, round(cluster.bw_near / cluster.bw_far))
        new_E = place(
            ids_NK,
            experts=old_E.numel(),
            ranks=cluster.ranks,
            ranks_per_node=per_node,
            node_weight=ratio if config.node_weight is None else config.node_weight,
            balance_weight=config.balance_weight,
            load_E=torch.stack([load for load in loads if load is not None]).sum(0),
        )
        new_E = relabelled(new_E, old_E, cluster.ranks, per_node)
        before, after = (
            layer_seconds(
                ids_NK, main_E, cluster=cluster, model_dims=module.dims,
                dispatcher=module.config.dispatcher, tokens=self.tokens * cluster.ranks,
                levelled=module.engine.replica_slots > 0,
            )
            for main_E in (old_E, new_E)
        )  # fmt: skip
        saving = (before - after) * self.microbatches * min(config.refresh_steps, steps_left)
        cost = move_seconds(new_E, old_E, cluster=cluster, model_dims=module.dims)
        rows, fewer = (
            placement_quality(ids_NK, main_E, ranks=cluster.ranks, ranks_per_node=per_node).rows
            for main_E in (old_E, new_E)
        )
        experts = int((new_E != old_E).sum())
        return Decision(new_E if saving > cost else None, experts, rows, fewer, saving, cost)

    def move(self, mains: dict[int, Tensor]) -> None:
        """Give each named layer its placement (E,): rows and optimizer state travel."""
        extents = self._extents()
        for number in sorted(mains):
            module = self.layers.get(number)
            if module is None:
                continue
            from_E = position_of(module.main_E)[torch.argsort(mains[number], stable=True)]
            for name in WEIGHTS:
                parameter = getattr(module.inner_experts, name)
                for tensor in (parameter, *self._states(parameter)):
                    exchange_rows(local(tensor), from_E, extents[number, name])
            module.adopt(mains[number])

    def _states(self, parameter: nn.Parameter) -> list[Tensor]:
        """The optimizer's tensors of the parameter's shape: moments and master copies."""
        return [
            value
            for optimizer in self.optimizers
            for value in optimizer.state.get(parameter, {}).values()
            if isinstance(value, Tensor) and value.shape == parameter.shape
        ]

    def _extents(self) -> dict[tuple[int, str], dict[int, "Extent"]]:
        """Which rows of each parameter lie on which global rank, as `exchange_rows` takes them."""
        mine = {
            (number, name): extent(getattr(module.inner_experts, name))
            for number, module in self.layers.items()
            for name in WEIGHTS
        }
        everyone = _gather(mine)
        return {
            key: {
                rank: extents[key]
                for rank, extents in enumerate(everyone)
                if key in extents and extents[key].rest == own.rest
            }
            for key, own in mine.items()
        }

    # --- checkpoints: DCP calls these on the entry "placement"

    def state_dict(self) -> dict[str, Any]:
        """Placement, sample and load of this rank's layers, under keys of this rank."""
        return {
            f"rank{dist.get_rank()}": {
                str(number): {
                    "main_E": module.main_E.clone(),  # DCP loads in place
                    "load_E": module.load_E,
                    **module.sample.state(module.config.token_dispatcher.top_k),
                }
                for number, module in self.layers.items()
            }
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, layer in state[f"rank{dist.get_rank()}"].items():
            module = self.layers[int(number)]
            module.load_E = layer["load_E"]
            module.sample.restore(layer)
            self.loaded[int(number)] = layer["main_E"].clone()

    def restore(self) -> None:
        """After a checkpoint was loaded in logical order: the placement that it was saved under."""
        everyone = {
            number: main_E for part in _gather(self.loaded) for number, main_E in part.items()
        }
        self.loaded = {}
        self.move(everyone)


def _told(moved: list[Decision], layers: int, seconds: float) -> str:
    """What a refresh did, for people. Rows are means over the layers that moved."""
    if not moved:
        return f"placement: none of {layers} layers moves, none would pay; {seconds:.1f} s"
    rows, fewer = (
        sum(getattr(each, name) for each in moved) / len(moved) for name in ("rows", "fewer")
    )
    saving, cost = (sum(getattr(each, name) for each in moved) for name in ("saving", "cost"))
    return (
        f"placement: {sum(each.experts for each in moved)} experts of {len(moved)} of {layers} "
        f"layers moved, {rows:.2f} -> {fewer:.2f} rows a token, modelled to save {saving:.3g} s "
        f"for {cost:.3g} s; {seconds:.1f} s"
    )


@dataclass(frozen=True)
class Extent:
    """The rows [first, first + rows) of a parameter; ``rest`` tells apart who hold the same rows:
    other columns, or another data-parallel replica."""

    first: int
    rows: int
    rest: tuple[int, ...]


def extent(parameter: Tensor) -> Extent:
    if not isinstance(parameter, DTensor):
        return Extent(0, len(parameter), ())
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    replica = [
        index
        for index, placement in zip(parameter.device_mesh.get_coordinate(), parameter.placements)
        if placement.is_replicate()
    ]
    return Extent(offset[0], shape[0], (*offset[1:], *replica))


def exchange_rows(rows: Tensor, from_E: Tensor, extents: dict[int, Extent]) -> None:
    """In place: row p of the whole becomes its old row ``from_E[p]``. ``rows``: this rank's part.

    ``extents``: the parts of all ranks that take part, by global rank, together every row once. One
    message for each pair of ranks that have something to send, so a row that stays costs nothing.
    Collective over those ranks.
    """
    me = extents[dist.get_rank()]
    wanted = from_E[me.first : me.first + me.rows]
    old = rows.clone()
    sends, receives, operations = [], [], []
    for rank, other in sorted(extents.items()):
        theirs = from_E[other.first : other.first + other.rows]
        out = theirs[(theirs >= me.first) & (theirs < me.first + me.rows)] - me.first
        places = ((wanted >= other.first) & (wanted < other.first + other.rows)).nonzero().flatten()
        if rank == dist.get_rank():
            rows[places.to(rows.device)] = old[out.to(rows.device)]
            continue
        if len(out):
            sends.append(old[out.to(rows.device)])
            operations.append(dist.P2POp(dist.isend, sends[-1], rank))
        if len(places):
            receives.append((places, rows.new_empty(len(places), *rows.shape[1:])))
            operations.append(dist.P2POp(dist.irecv, receives[-1][1], rank))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    for places, arrived in receives:
        rows[places.to(rows.device)] = arrived


def local(tensor: Tensor) -> Tensor:
    """This rank's part, detached: writing to it writes to the parameter."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gather(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
