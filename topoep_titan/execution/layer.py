"""One MoE layer's routed experts under a plan, from counts to combined outputs.

Letters: R ranks, E experts, e = E/R mains a rank, S replica slots a rank, T tokens, K top-k,
D width, F expert width. Order: gather counts, plan (a planner in rows gathers once more), then the
pipeline (pull, dispatch, experts, combine). The layers of a model share one ``Engine``: transport,
lane and buffers.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from topoep_titan.execution.buffers import Buffers
from topoep_titan.execution.deepep import OpenBuffer, deepep_chunks
from topoep_titan.execution.dispatchers import plan_chunks
from topoep_titan.execution.experts import PLAIN, Matmuls
from topoep_titan.execution.lane import StreamLane, ThreadLane
from topoep_titan.execution.pipeline import Call, routed_experts
from topoep_titan.execution.replicas import plan_copies
from topoep_titan.execution.row_kernels import kernels_for
from topoep_titan.execution.transport import Transport
from topoep_titan.planning.plan import (
    DevicePlanner,
    Plan,
    RowPlanner,
    check_plan,
    check_slots,
)


class PlanMismatchError(RuntimeError):
    """Ranks of one group derived different plans: a defect of the planner or of its inputs."""


@dataclass
class Engine:
    """What the layers of a model share on one rank of an expert-parallel group."""

    # Deterministic. A plain function maps load_RE on the CPU to a Plan.
    planner: Callable[[Tensor], Plan] | RowPlanner | DevicePlanner
    main_E: Tensor
    replica_slots: int
    dispatcher: str  # "alltoall", "dedup", "dedup-node" or "deepep"
    chunks: int
    compute_dtype: torch.dtype
    transport: Transport
    lane: ThreadLane | StreamLane
    matmuls: Matmuls = PLAIN
    verify_plan: bool = False
    open_buffer: OpenBuffer | None = None  # with "deepep"
    # Holds the Buffers once the first layer has made them; copies of this engine share it.
    memory: list[Buffers] = field(default_factory=list)

    @property
    def buffers(self) -> Buffers | None:
        return self.memory[0] if self.memory else None

    @buffers.setter
    def buffers(self, buffers: Buffers) -> None:
        self.memory[:] = [buffers]


@dataclass(frozen=True)
class LayerRecord:
    """What one call planned, for metrics."""

    load_RE: Tensor
    plan: Plan
    main_E: Tensor  # as the plan was made; experts may move later
    plan_seconds: float
    rows_RX: Tensor | None  # rows of each rank to each rank and node, where we deduplicate them


def run_layer(
    x_TD: Tensor,
    scores_TK: Tensor,
    ids_TK: Tensor,
    counts_E: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    engine: Engine,
    layer: int = 0,
) -> tuple[Tensor, LayerRecord]:
    """Route, execute and combine this rank's tokens; collective over the transport's ranks.

    ``counts_E``: this rank's assignments per expert. ``weights``: w1 (e, F, D), w2 (e, D, F) and
    w3 (e, F, D) of this rank's mains in ascending logical id. ``layer`` tells layers apart.
    Returns (T, D) in the dtype of ``x_TD``, differentiable in x, scores and weights.
    Raises PlanError when the first plan of a run (with ``verify_plan`` any plan) breaks a law, and
    PlanMismatchError (with ``verify_plan``) on every rank of the group when plans differ.
    """
    transport = engine.transport
    load_RE, plan, slot_TK, plan_seconds = _plan(engine, transport.gather(counts_E), ids_TK)
    if engine.verify_plan or engine.buffers is None:  # at least the first plan of a run
        check_plan(plan, load_RE, engine.main_E, engine.replica_slots)
        check_slots(plan, slot_TK, transport.rank)
    if engine.verify_plan:
        check_same_plan(plan, transport, x_TD.device)
    if engine.buffers is None:
        engine.buffers = Buffers(
            weights,
            ranks=transport.ranks,
            replica_slots=engine.replica_slots,
            compute_dtype=engine.compute_dtype,
            one_sided=transport.one_sided,
            allocate=transport.allocate,
        )
    if engine.dispatcher == "deepep":
        chunks = deepep_chunks(
            engine.open_buffer, plan, slot_TK, x_TD.shape[1], transport, engine.chunks
        )
        rows_RX = None
    else:
        chunks, rows_RX = plan_chunks(engine.dispatcher, plan, slot_TK, transport, engine.chunks)
    call = Call(
        chunks=chunks,
        copies=plan_copies(plan, engine.main_E, transport.ranks, transport.rank, x_TD.device),
        placement=(layer, plan.expert_G.numpy().tobytes()),
        compute_dtype=engine.compute_dtype,
        matmuls=engine.matmuls,
        transport=transport,
        lane=engine.lane,
        buffers=engine.buffers,
    )
    out_TD = routed_experts(x_TD, scores_TK, weights, call)
    return out_TD, LayerRecord(load_RE, plan, engine.main_E, plan_seconds, rows_RX)


def _plan(engine: Engine, load_RE: Tensor, ids_TK: Tensor) -> tuple[Tensor, Plan, Tensor, float]:
    """The load and the plan on the CPU, the slot of each assignment, seconds of planning.

    On CUDA the host waits for the device once: for the load, or, where the device plans, for the
    plan, because collectives take split sizes and copies from the host. A planner in rows waits
    twice more.
    """
    transport, planner, device = engine.transport, engine.planner, ids_TK.device
    transport.host_syncs += load_RE.is_cuda
    if isinstance(planner, DevicePlanner):
        return _plan_on_device(planner, load_RE, ids_TK, transport.rank)
    load_RE = load_RE.cpu()
    if not isinstance(planner, RowPlanner):
        started = time.perf_counter()
        plan = planner(load_RE)
        seconds = time.perf_counter() - started
        split_G = plan.assignments_RG[transport.rank].to(device)
        slot_TK = kernels_for(device).assign(
            ids_TK, plan.expert_G.to(device), split_G, load_RE.shape[1]
        )
        return load_RE, plan, slot_TK, seconds
    transport.host_syncs += 2 * ids_TK.is_cuda
    ids_TK = ids_TK.cpu()
    started = time.perf_counter()
    proposal = planner.propose(ids_TK, load_RE, rank=transport.rank)
    proposed = time.perf_counter()
    rows_RCX = transport.gather(proposal.rows_CX.to(device)).cpu()
    gathered = time.perf_counter()
    plan, slot_TK = planner.finish(proposal, rows_RCX)
    seconds = time.perf_counter() - gathered + proposed - started  # the wait for others left out
    return load_RE, plan, slot_TK.to(device, torch.int64), seconds


def _plan_on_device(
    planner: DevicePlanner, load_RE: Tensor, ids_TK: Tensor, rank: int
) -> tuple[Tensor, Plan, Tensor, float]:
    """As ``_plan``. The host looks once, behind plan and slots: it reads plan and load together."""
    device, experts = load_RE.device, load_RE.shape[1]
    clock = _Clock(device)
    plan = planner(load_RE)
    clock.stop()
    slot_TK = kernels_for(device).assign(ids_TK, plan.expert_G, plan.assignments_RG[rank], experts)
    parts = (plan.expert_G, plan.assignments_RG, load_RE.to(torch.int32))
    flat = torch.cat([part.reshape(-1) for part in parts]).cpu()
    expert_G, assignments_RG, load_RE = (
        values.view(part.shape)
        for part, values in zip(parts, flat.split([part.numel() for part in parts]))
    )
    return load_RE.long(), Plan(expert_G, assignments_RG), slot_TK, clock.seconds()


class _Clock:
    """Seconds that a device takes for what is submitted between making and stopping the clock."""

    def __init__(self, device: torch.device):
        self.marks = []
        self.on_gpu = device.type == "cuda"
        self.stop()

    def stop(self) -> None:
        if self.on_gpu:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> float:
        """On a GPU, after the host has waited for it."""
        begin, end = self.marks
        return begin.elapsed_time(end) / 1e3 if self.on_gpu else end - begin


def check_same_plan(plan: Plan, transport: Transport, device: torch.device) -> None:
    """Raise PlanMismatchError on all ranks unless all hold the same plan, bit for bit."""
    digest = hashlib.sha256(
        plan.expert_G.numpy().tobytes() + plan.assignments_RG.numpy().tobytes()
    ).digest()
    word = int.from_bytes(digest[:8], "little", signed=True)
    words = transport.gather(torch.tensor([word], device=device)).flatten().tolist()
    if len(set(words)) > 1:
        ranks_of = {word: [r for r, other in enumerate(words) if other == word] for word in words}
        groups = "; ".join(f"ranks {ranks} agree" for ranks in ranks_of.values())
        raise PlanMismatchError(
            f"plans differ within the expert-parallel group of {transport.ranks}: {groups}. "
            "Planners must be deterministic and see the same load, cluster file and settings"
        )
