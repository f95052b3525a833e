"""What a rank runs in test_layer.py: the distributed layer on its share of one global problem."""

import torch
import torch.distributed as dist

from topoep_titan.cluster import ModelDims, load_cluster
from topoep_titan.execution.layer import run_layer
from topoep_titan.execution.reference import reference_layer
from topoep_titan.execution.transport import CollectiveTransport
from topoep_titan.planning import PLANNERS
from topoep_titan.planning.plan import Plan, check_plan, unbalanced_plan

E, D, F, K, S = 8, 16, 32, 2, 2
TOKENS = (13, 0, 21, 6)  # ragged; rank 1 has no tokens at all


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
    """An adversarial plan: every replica slot filled, the first source's work spread over all."""
    plan = unbalanced_plan(load_RE, main_E, S)
    ranks = load_RE.shape[0]
    per_rank = E // ranks + S
    expert_G, assignments_RG = plan.expert_G.clone(), plan.assignments_RG.clone()
    for rank in range(ranks):
        away = (main_E != rank).nonzero().flatten().tolist()
        for i in range(S):
            expert = away[(3 * rank + i) % len(away)]
            slot = rank * per_rank + E // ranks + i
            if expert in expert_G[rank * per_rank : (rank + 1) * per_rank].tolist():
                continue
            expert_G[slot] = expert
            main = int((plan.expert_G == expert).nonzero())
            moved = assignments_RG[:, main] // 2
            assignments_RG[:, main] -= moved
            assignments_RG[:, slot] += moved
    return Plan(expert_G, assignments_RG)


def planner_of(name: str, main_E: torch.Tensor, ranks: int):
    if name == "full slots":
        return lambda load_RE: full_slots(load_RE, main_E)
    cluster = load_cluster("h800_4x8").resized(ranks, ranks_per_node=min(2, ranks))
    return lambda load_RE: PLANNERS[name](
        load_RE, main_E=main_E, cluster=cluster, model_dims=ModelDims(D, 1), replica_slots=S
    )


def layer_against_oracle(rank: int, ranks: int, planner: str, routing: str) -> dict[str, float]:
    """Largest difference of outputs and gradients, relative to the oracle's largest value."""
    ids_TK, x_TD, scores_TK, *weights, grad_TD = problem(routing, ranks, torch.float64)
    main_E = torch.randperm(E, generator=torch.Generator().manual_seed(1)) // (E // ranks)
    mine_e = (main_E == rank).nonzero().flatten()
    start = sum(TOKENS[:rank])
    mine_T = slice(start, start + TOKENS[rank])

    local = [t.clone().requires_grad_() for t in (x_TD[mine_T], scores_TK[mine_T])]
    local += [w[mine_e].clone().requires_grad_() for w in weights]
    out_TD, record = run_layer(
        local[0], local[1], ids_TK[mine_T], torch.bincount(ids_TK[mine_T].flatten(), minlength=E),
        tuple(local[2:]), planner=planner_of(planner, main_E, ranks), main_E=main_E,
        replica_slots=S, transport=CollectiveTransport(dist.group.WORLD),
        compute_dtype=torch.float64,
    )  # fmt: skip
    check_plan(record.plan, record.load_RE, main_E, S)
    out_TD.backward(grad_TD[mine_T])

    oracle = [t.clone().requires_grad_() for t in (x_TD, scores_TK, *weights)]
    expected_TD = reference_layer(oracle[0], oracle[1], ids_TK, *oracle[2:])
    expected_TD.backward(grad_TD)
    pairs = {
        "out": (out_TD, expected_TD[mine_T], expected_TD),
        "x": (local[0].grad, oracle[0].grad[mine_T], oracle[0].grad),
        "scores": (local[1].grad, oracle[1].grad[mine_T], oracle[1].grad),
    }
    for name, ours, theirs in zip(("w1", "w2", "w3"), local[2:], oracle[2:]):
        pairs[name] = ours.grad, theirs.grad[mine_e], theirs.grad
    errors = {
        name: ((ours - theirs).abs().max() / whole.abs().max()).item() if ours.numel() else 0.0
        for name, (ours, theirs, whole) in pairs.items()
    }
    return errors | {"replicas": record.plan.num_replicas}


def layer_bits(rank: int, ranks: int, dtype: torch.dtype) -> bytes:
    """Output and gradients of one fp32 or bf16 layer, as bytes."""
    ids_TK, x_TD, scores_TK, *weights, grad_TD = problem("hot", ranks, dtype)
    main_E = torch.arange(E) // (E // ranks)
    start = sum(TOKENS[:rank])
    mine_T = slice(start, start + TOKENS[rank])
    local = [t.clone().requires_grad_() for t in (x_TD[mine_T], scores_TK[mine_T])]
    local += [w[main_E == rank].clone().requires_grad_() for w in weights]
    out_TD, _ = run_layer(
        local[0], local[1], ids_TK[mine_T], torch.bincount(ids_TK[mine_T].flatten(), minlength=E),
        tuple(local[2:]), planner=planner_of("full slots", main_E, ranks), main_E=main_E,
        replica_slots=S, transport=CollectiveTransport(dist.group.WORLD), compute_dtype=dtype,
    )  # fmt: skip
    out_TD.backward(grad_TD[mine_T])
    assert all(torch.isfinite(t.grad).all() for t in local)
    return b"".join(
        t.detach().float().numpy().tobytes() for t in (out_TD, *(t.grad for t in local))
    )
