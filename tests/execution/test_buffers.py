"""Memory for balancing: as large as the formula says, shared by all layers, read where full."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.execution.layer_cases import (
    TOKENS,
    D,
    E,
    F,
    S,
    gloo_transport,
    on_virtual_ranks,
    planner_of,
    problem,
    shuffled_mains,
)
from topoep_titan.execution.buffers import Buffers, buffer_bytes
from topoep_titan.execution.lane import ThreadLane
from topoep_titan.execution.layer import Engine, run_layer
from topoep_titan.planning.plan import contiguous_mains, unbalanced_plan

R = 4
EXPERT = 3 * D * F  # parameters


def experts(num: int, dtype: torch.dtype):
    return tuple(torch.zeros(num, *shape, dtype=dtype) for shape in ((F, D), (D, F), (F, D)))


@pytest.mark.parametrize(
    ("kept", "computed", "one_sided", "copies"),
    [
        # (e + S + E + S) * |W|, the paper's three buffers and staging, or without e
        (torch.float32, torch.float32, False, 2 + 8 + 2),
        (torch.float32, torch.float32, True, 2 + 2 + 8 + 2),
        (torch.float32, torch.bfloat16, False, 2 + 2 + 8 + 2),
    ],
)
def test_bytes_are_the_formula(kept, computed, one_sided, copies):
    buffers = Buffers(
        experts(E // R, kept), ranks=R, replica_slots=S, compute_dtype=computed,
        one_sided=one_sided,
    )  # fmt: skip
    assert (E // R, S, E) == (2, 2, 8)
    expert_bytes = EXPERT * computed.itemsize
    assert buffers.nbytes == copies * expert_bytes
    assert buffers.nbytes == buffer_bytes(
        expert_bytes, experts=E, ranks=R, replica_slots=S, mains=buffers.mains is not None
    )
    storages = (*(buffers.mains or ()), *buffers.slots, *buffers.staging, *buffers.regions)
    assert sum(t.untyped_storage().nbytes() for t in storages) == buffers.nbytes


def test_nothing_is_held_without_slots():
    buffers = Buffers(
        experts(8, torch.float32), ranks=1, replica_slots=0, compute_dtype=torch.float32,
        one_sided=False,
    )  # fmt: skip
    assert buffers.nbytes == 0


def two_layers(transport, recompute: bool):
    """Two layers over one engine whose buffers start as NaN: (gradients, copies pulled)."""
    rank, main_E = transport.rank, shuffled_mains(R)
    ids_TK, x_TD, scores_TK, *weights, grad_TD = problem("hot", R, torch.float64)
    start = sum(TOKENS[:rank])
    mine_T = slice(start, start + TOKENS[rank])
    x_TD, scores_TK, ids_TK = x_TD[mine_T].requires_grad_(), scores_TK[mine_T], ids_TK[mine_T]
    mains = [w[main_E == rank].clone().requires_grad_() for w in weights]
    others = [w.flip(0)[main_E == rank].clone().requires_grad_() for w in weights]
    counts_E = torch.bincount(ids_TK.flatten(), minlength=E)
    engine = Engine(
        planner=planner_of("full slots", "alltoall", main_E, R), main_E=main_E, replica_slots=S,
        dispatcher="alltoall", chunks=2, compute_dtype=torch.float64, transport=transport,
        lane=ThreadLane(),
    )  # fmt: skip
    engine.buffers = Buffers(
        mains, ranks=R, replica_slots=S, compute_dtype=torch.float64,
        one_sided=transport.one_sided,
    )  # fmt: skip
    for buffer in (*engine.buffers.slots, *engine.buffers.staging, *engine.buffers.regions):
        buffer.fill_(math.nan)

    def layer(x_TD, layer_weights, number):
        return run_layer(x_TD, scores_TK, ids_TK, counts_E, layer_weights, engine, number)[0]

    hidden_TD = x_TD
    for number, layer_weights in enumerate((tuple(mains), tuple(others))):
        if recompute:
            hidden_TD = checkpoint(layer, hidden_TD, layer_weights, number, use_reentrant=False)
        else:
            hidden_TD = layer(hidden_TD, layer_weights, number)
    hidden_TD.backward(grad_TD[mine_T])
    sent = engine.transport.traffic.drain()
    pulled = sum(sent["parameter", link][1] for link in ("own", "near", "far"))
    names = ("x", *(f"w{i} of layer {layer}" for layer in (1, 2) for i in (1, 2, 3)))
    grads = {name: t.grad for name, t in zip(names, (x_TD, *mains, *others))}
    assert all(torch.isfinite(grad).all() for grad in grads.values())
    return grads, pulled // (EXPERT * 8)


def differences(grads, expected) -> dict[str, float]:
    """Largest difference of every gradient that is not bitwise the expected one."""
    return {
        name: (grads[name] - whole).abs().max().item()
        for name, whole in expected.items()
        if not torch.equal(grads[name], whole)
    }


@pytest.mark.parametrize("recompute", [False, True])
def test_layers_share_slots_and_pull_again_only_when_overwritten(recompute):
    """Every slot is full (R*S copies). Plain: the second layer's replicas are still there when its
    backward comes, the first layer's are not. Checkpointed: each recompute pulls, no backward does.
    """
    results = on_virtual_ranks(R, 2, two_layers, recompute)
    pulls = 2 + 2 if recompute else 2 + 1
    assert sum(pulled for _, pulled in results) == pulls * R * S
    for (grads, _), (plain, _) in zip(results, on_virtual_ranks(R, 2, two_layers, False)):
        assert differences(grads, plain) == {}


def sums_of_planted_gradients(transport, planted: tuple[float, ...], dtype):
    """Expert 0 is replicated on every other rank; their gradients are replaced by ``planted``."""
    rank, main_E = transport.rank, contiguous_mains(R, E)
    ids_TK, x_TD, scores_TK, *weights, _ = problem("one expert", R, dtype)
    start = sum(TOKENS[:rank])
    mine_T = slice(start, start + TOKENS[rank])
    mains = tuple(w[main_E == rank].clone().requires_grad_() for w in weights)

    def everywhere(load_RE):
        plan = unbalanced_plan(load_RE, main_E, S)
        plan.expert_G.view(R, -1)[1:, E // R] = 0
        return plan

    engine = Engine(
        planner=everywhere, main_E=main_E, replica_slots=S, dispatcher="alltoall", chunks=1,
        compute_dtype=dtype, transport=transport, lane=ThreadLane(),
    )  # fmt: skip
    push = transport.push

    def plant(copies, grads, regions):
        push(copies, grads, regions)
        for copy in copies.outgoing:
            for region in regions:
                region[copy.peer, copy.main] = planted[copy.peer]

    transport.push = plant
    counts_E = torch.bincount(ids_TK[mine_T].flatten(), minlength=E)
    x_TD, scores_TK = x_TD[mine_T].requires_grad_(), scores_TK[mine_T]
    out_TD, _ = run_layer(x_TD, scores_TK, ids_TK[mine_T], counts_E, mains, engine, 0)
    out_TD.backward(torch.zeros_like(out_TD))  # expert 0's own gradient is 0
    return [main.grad[0] for main in mains]


def test_replica_gradients_are_summed_by_ascending_rank():
    """1 + 2**27 - 2**27 is 0 in float32; in the opposite order it is 1."""
    planted = (0.0, 1.0, 2.0**27, -(2.0**27))
    grads = on_virtual_ranks(R, 2, sums_of_planted_gradients, planted, torch.float32)
    assert all((grad == 0).all() for grad in grads[0])


def test_replica_gradients_of_bfloat16_are_summed_in_float32():
    """256 + 1 - 256 is 1 in float32; in bfloat16 it is 0."""
    planted = (0.0, 256.0, 1.0, -256.0)
    grads = on_virtual_ranks(R, 2, sums_of_planted_gradients, planted, torch.bfloat16)
    assert all((grad == 1).all() for grad in grads[0])


def over_gloo(rank: int, ranks: int):
    return two_layers(gloo_transport(rank, ranks, ranks, 2), True)


@pytest.mark.ranks
def test_collective_copies_give_what_one_sided_copies_give(four_ranks):
    one_sided = on_virtual_ranks(R, 2, two_layers, False)
    for (grads, _), (expected, _) in zip(four_ranks.run(over_gloo), one_sided):
        assert differences(grads, expected) == {}
