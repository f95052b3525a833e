"""One global problem and what a rank runs on its share of it, over gloo or in the loopback."""

import threading
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from topoep_titan.cluster import ModelDims, load_cluster
from topoep_titan.execution.deepep import PLANNED_AS
from topoep_titan.execution.lane import ThreadLane
from topoep_titan.execution.layer import Engine, run_layer
from topoep_titan.execution.loopback import Loopback
from topoep_titan.execution.reference import reference_layer
from topoep_titan.execution.transport import CollectiveTransport, Transport
from topoep_titan.planning import RowPlanner, device_planner, make_planner
from topoep_titan.planning.plan import Plan, check_plan, unbalanced_plan

E, D, F, K, S = 8, 16, 32, 3, 2
TOKENS = (13, 0, 21, 6, 9, 2, 17, 4)  # ragged; rank 1 has no tokens at all


def problem(routing: str, ranks: int, dtype: torch.dtype):
    """The tokens of all ranks in rank order, their routing, and all experts' parameters."""
    generator = torch.Generator().manual_seed(7)
    tokens = sum(TOKENS[:ranks])
    logits = torch.randn(tokens, E, generator=generator)
    if routing == "one expert":
        logits[:, 3] += 100
    elif routing == "hot":
        logits[:, [0, 5]] += 2
    ids_TK = logits.topk(K).indices
    x_TD = torch.randn(tokens, D, generator=generator, dtype=torch.float64)
    scores_TK = torch.rand(tokens, K, generator=generator, dtype=torch.float64)
    weights = [
        torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
        for shape in ((E, F, D), (E, D, F), (E, F, D))
    ]
    grad_TD = torch.randn(tokens, D, generator=generator, dtype=torch.float64)
    floats = [t.to(dtype) for t in (x_TD, scores_TK, *weights, grad_TD)]
    return ids_TK, *floats


def full_slots(load_RE, main_E):
    """An adversarial plan: every replica slot filled, half of an expert's work in its replicas."""
    plan = unbalanced_plan(load_RE, main_E, S)
    ranks = load_RE.shape[0]
    per_rank = E // ranks + S
    expert_G, assignments_RG = plan.expert_G.clone(), plan.assignments_RG.clone()
    for rank in range(ranks):
        away = (main_E != rank).nonzero().flatten().tolist()
        for i in range(S):
            expert = away[(3 * rank + i) % len(away)]
            slot = rank * per_rank + E // ranks + i
            expert_G[slot] = expert
            main = int((plan.expert_G == expert).nonzero())
            moved = assignments_RG[:, main] // 2
            assignments_RG[:, main] -= moved
            assignments_RG[:, slot] += moved
    return Plan(expert_G, assignments_RG)


def idle_replica(load_RE, main_E):
    """An adversarial plan: rank 0 hosts a replica that executes nothing, in its second slot."""
    plan = unbalanced_plan(load_RE, main_E, S)
    expert_G = plan.expert_G.clone()
    expert_G[E // load_RE.shape[0] + 1] = int((main_E != 0).nonzero()[0])
    return Plan(expert_G, plan.assignments_RG)


def planner_of(
    name: str, dispatcher: str, main_E: torch.Tensor, ranks: int
) -> Callable | RowPlanner:
    if name in ("full slots", "idle replica"):
        adversary = full_slots if name == "full slots" else idle_replica
        return lambda load_RE: adversary(load_RE, main_E)
    cluster = load_cluster("h800_4x8").resized(ranks, ranks_per_node=min(2, ranks))
    settings = {
        "main_E": main_E, "model_dims": ModelDims(D, 1), "replica_slots": S,
        "cluster": replace(cluster, plan_us=0),  # so few tokens do not pay for the planning
    }  # fmt: skip
    if name.endswith(" on the device"):
        planner = device_planner(name.split()[0], torch.device("cpu"), **settings)
        assert planner is not None
        return planner
    dispatcher = PLANNED_AS if dispatcher == "deepep" else dispatcher
    return make_planner(name, dispatcher, **settings)


def shuffled_mains(ranks: int) -> torch.Tensor:
    return torch.randperm(E, generator=torch.Generator().manual_seed(1)) // (E // ranks)


def run_share(
    transport: Transport,
    dispatcher: str,
    chunks: int,
    planner: str,
    routing: str,
    dtype: torch.dtype,
    compute_dtype: torch.dtype | None = None,
    open_buffer: Callable | None = None,
):
    """This rank's share, forward and backward: (leaves, output, record, engine)."""
    rank, ranks = transport.rank, transport.ranks
    ids_TK, x_TD, scores_TK, *weights, grad_TD = problem(routing, ranks, dtype)
    main_E = shuffled_mains(ranks)
    start = sum(TOKENS[:rank])
    mine_T = slice(start, start + TOKENS[rank])
    leaves = [t.clone().requires_grad_() for t in (x_TD[mine_T], scores_TK[mine_T])]
    leaves += [w[main_E == rank].clone().requires_grad_() for w in weights]
    engine = Engine(
        planner=planner_of(planner, dispatcher, main_E, ranks), main_E=main_E, replica_slots=S,
        dispatcher=dispatcher, chunks=chunks, compute_dtype=compute_dtype or dtype,
        transport=transport, lane=ThreadLane(), verify_plan=True, open_buffer=open_buffer,
    )  # fmt: skip
    counts_E = torch.bincount(ids_TK[mine_T].flatten(), minlength=E)
    out_TD, record = run_layer(
        leaves[0], leaves[1], ids_TK[mine_T], counts_E, tuple(leaves[2:]), engine
    )
    check_plan(record.plan, record.load_RE, main_E, S)
    out_TD.backward(grad_TD[mine_T])
    return leaves, out_TD.detach(), record, engine


def errors_of(transport: Transport, *case, open_buffer=None) -> dict[str, float]:
    """Largest difference of output and gradients, relative to the oracle's largest value."""
    rank, ranks = transport.rank, transport.ranks
    leaves, out_TD, record, _ = run_share(transport, *case, torch.float64, open_buffer=open_buffer)
    ids_TK, x_TD, scores_TK, *weights, grad_TD = problem(case[-1], ranks, torch.float64)
    oracle = [t.clone().requires_grad_() for t in (x_TD, scores_TK, *weights)]
    expected_TD = reference_layer(oracle[0], oracle[1], ids_TK, *oracle[2:])
    expected_TD.backward(grad_TD)
    start = sum(TOKENS[:rank])
    mine_T, mine_e = slice(start, start + TOKENS[rank]), shuffled_mains(ranks) == rank
    expected = [(expected_TD.detach(), mine_T), (oracle[0].grad, mine_T), (oracle[1].grad, mine_T)]
    expected += [(leaf.grad, mine_e) for leaf in oracle[2:]]
    ours = [out_TD, *(leaf.grad for leaf in leaves)]
    errors = {
        name: ((mine - whole[part]).abs().max() / whole.abs().max()).item() if mine.numel() else 0.0
        for name, mine, (whole, part) in zip(
            ("out", "x", "scores", "w1", "w2", "w3"), ours, expected
        )
    }
    return errors | {"replicas": record.plan.num_replicas}


def gloo_transport(rank: int, ranks: int, world: int, per_node: int) -> Transport | None:
    """A transport over the first ``world`` of the pool's ranks, None on the others."""
    group = dist.new_group(list(range(world)))
    return CollectiveTransport(group, per_node) if rank < world else None


def gloo_errors(rank: int, ranks: int, world: int, per_node: int, *case):
    transport = gloo_transport(rank, ranks, world, per_node)
    return errors_of(transport, *case) if transport else None


def gloo_bits(rank: int, ranks: int, dtype: torch.dtype, *case) -> bytes:
    """Output and gradients of one layer in fp32 or bf16, as bytes."""
    leaves, out_TD, *_ = run_share(gloo_transport(rank, ranks, ranks, 2), *case, dtype)
    tensors = (out_TD, *(leaf.grad for leaf in leaves))
    assert all(torch.isfinite(t).all() for t in tensors)
    return b"".join(t.float().numpy().tobytes() for t in tensors)


def on_virtual_ranks(ranks: int, per_node: int, share: Callable, *case) -> list:
    """``share(transport, *case)`` on every virtual rank of a loopback; results by rank."""
    loopback = Loopback(ranks, per_node)
    results: list = [None] * ranks

    def work(rank: int) -> None:
        try:
            results[rank] = share(loopback.transport(rank), *case)
        except BaseException as error:
            results[rank] = error
            loopback.barrier.abort()  # the others must not wait for this rank

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in sorted(results, key=lambda r: isinstance(r, threading.BrokenBarrierError)):
        if isinstance(result, BaseException):
            raise result
    return results
