"""Expert copies by kernels over shared memory: bit for bit what collectives bring."""

import os
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from topoep_kernels.transfers import reduce_gradients
from torch.utils.checkpoint import checkpoint

from tests.execution.layer_cases import (
    TOKENS,
    D,
    E,
    F,
    S,
    planner_of,
    problem,
    run_share,
    shuffled_mains,
)
from tests.native_library import build_or_skip
from topoep_titan.errors import InputError
from topoep_titan.execution import pipeline
from topoep_titan.execution.buffers import Buffers
from topoep_titan.execution.lane import make_lane
from topoep_titan.execution.layer import Engine, run_layer
from topoep_titan.execution.one_sided import TransportError, make_transport
from topoep_titan.planning.plan import unbalanced_plan

CPU = torch.device("cpu")
BFLOAT16, FLOAT, DOUBLE = torch.bfloat16, torch.float32, torch.float64


@pytest.fixture(scope="module", autouse=True)
def _library():
    build_or_skip()


def layer_bits(transport, dispatcher, chunks, planner, dtype):
    """(output and gradients of one layer as bytes, bytes of the expert copies sent)."""
    leaves, out_TD, _, engine = run_share(transport, dispatcher, chunks, planner, "hot", dtype)
    sent = engine.transport.traffic.drain()
    copies = {key: sent[key] for key in sent if key[0] in ("parameter", "gradient")}
    return [tensor_bytes(t) for t in (out_TD, *(leaf.grad for leaf in leaves))], copies


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    assert torch.isfinite(tensor).all()
    return tensor.cpu().double().numpy().tobytes()


def compare_layers(rank, ranks, world, per_node, cases):
    group = dist.new_group(list(range(world)))
    if rank >= world:
        return None
    copied = 0
    for case in cases:
        one_sided, collective = (
            layer_bits(make_transport(name, group, per_node), *case)
            for name in ("symm_mem", "collective")
        )
        assert one_sided == collective, case
        copied += sum(nbytes for _, nbytes in one_sided[1].values())
    assert not list(Path("/dev/shm").glob(f"topoep-{os.getpid()}-*"))
    return copied


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "per_node"), [(2, 2), (4, 4), (4, 2)])
def test_copies_over_shared_memory_equal_collective_ones(four_ranks, world, per_node):
    """With two nodes of two ranks, a node's copies go over its memory and the others over gloo."""
    cases = [
        ("alltoall", 2, "full slots", FLOAT),
        ("dedup-node", 2, "full slots", BFLOAT16),
        ("dedup", 1, "topoep", DOUBLE),
        ("alltoall", 1, "idle replica", FLOAT),
        ("alltoall", 1, "none", FLOAT),
    ]
    copied = four_ranks.run(compare_layers, world, per_node, cases)
    assert sum(copied[:world]) > 0


def train(transport, *, chunks: int, recompute: bool, device: torch.device = CPU) -> list[bytes]:
    """Three steps of two layers on one engine, in fp32 with replicas in bfloat16; every step other
    tokens and another plan, the second step's without replicas. Parameters after each step."""
    rank, ranks = transport.rank, transport.ranks
    main_E = shuffled_mains(ranks)
    planned = iter(("full slots", "none", "idle replica"))
    engine = Engine(
        planner=None, main_E=main_E, replica_slots=S, dispatcher="alltoall", chunks=chunks,
        compute_dtype=BFLOAT16, transport=transport, lane=make_lane(device),
    )  # fmt: skip
    ids_TK, x_TD, scores_TK, *weights, grad_TD = problem("hot", ranks, FLOAT)
    start = sum(TOKENS[:rank])
    mine_T = slice(start, start + TOKENS[rank])
    layers = [
        [w[main_E == rank].clone().to(device).requires_grad_() for w in every]
        for every in (weights, [w.flip(0) for w in weights])
    ]
    after = []
    for step in range(3):
        name = next(planned)
        planner = (
            (lambda load_RE: unbalanced_plan(load_RE, main_E, S))
            if name == "none"
            else planner_of(name, "alltoall", main_E, ranks)
        )
        engine = replace(engine, planner=planner)
        ids = ((ids_TK[mine_T] + step) % E).to(device)
        counts_E = torch.bincount(ids.flatten(), minlength=E)
        scores = scores_TK[mine_T].to(device)

        def layer(x, parameters, number, engine=engine, ids=ids, counts=counts_E, scores=scores):
            return run_layer(x, scores, ids, counts, tuple(parameters), engine, number)[0]

        hidden = x_TD[mine_T].to(device)
        for number, parameters in enumerate(layers):
            hidden = (
                checkpoint(layer, hidden, parameters, number, use_reentrant=False)
                if recompute
                else layer(hidden, parameters, number)
            )
        hidden.backward(grad_TD[mine_T].to(device))
        with torch.no_grad():
            for parameter in (p for parameters in layers for p in parameters):
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
                after.append(tensor_bytes(parameter))
    return after


def sum_by_kernel(total, region, copies, rank):
    reduce_gradients(total, region, copies.expert_G, rank)


def compare_training(rank, ranks, per_node):
    for chunks, recompute in ((1, True), (2, False)):
        collective = train(
            make_transport("collective", dist.group.WORLD, per_node),
            chunks=chunks, recompute=recompute,
        )  # fmt: skip
        one_sided = make_transport("symm_mem", dist.group.WORLD, per_node)
        with patch.object(pipeline, "add_arrived", sum_by_kernel):  # as on a GPU
            assert train(one_sided, chunks=chunks, recompute=recompute) == collective


@pytest.mark.ranks
@pytest.mark.parametrize("per_node", [4, 2])
def test_steps_over_shared_memory_equal_collective_ones(four_ranks, per_node):
    """Layers share slots and regions, backward pulls again, and the sums are the kernel's."""
    four_ranks.run(compare_training, per_node)


def compare_with_slow_ranks(rank, ranks):
    """Rank 1 is late with its mains, and rank 2 with what its kernels copy."""

    def late(call, when):
        def waits(*arguments):
            if when:
                time.sleep(0.05)
            return call(*arguments)

        return waits

    settings = {"chunks": 1, "recompute": False}
    expected = train(make_transport("collective", dist.group.WORLD, ranks), **settings)
    one_sided = make_transport("symm_mem", dist.group.WORLD, ranks)
    one_sided.unverified.clear()
    one_sided._run = late(one_sided._run, rank == 2)
    written = late(Buffers.main_parameters, rank == 1)
    with patch.object(Buffers, "main_parameters", written):
        assert train(one_sided, **settings) == expected


@pytest.mark.ranks
def test_fences_wait_for_slow_ranks(four_ranks):
    four_ranks.run(compare_with_slow_ranks)


def wrong_addresses(rank, ranks, kind):
    transport = make_transport("symm_mem", dist.group.WORLD, ranks)
    move = transport._run

    def shifted(kernel, copies, theirs, ours):
        if kernel.__name__ == kind:
            everywhere_PR, here_P = transport._table(ours)
            transport.tables[ours[0].data_ptr()] = everywhere_PR, here_P + 16
        move(kernel, copies, theirs, ours)

    transport._run = shifted
    with pytest.raises(TransportError, match="did not arrive as sent"):
        train(transport, chunks=1, recompute=False)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["pull_replicas", "push_gradients"])
def test_a_run_stops_when_its_first_copies_are_wrong(four_ranks, kind):
    four_ranks.run(wrong_addresses, kind)


def odd_experts(rank, ranks):
    transport = make_transport("symm_mem", dist.group.WORLD, ranks)
    with pytest.raises(InputError, match=r"a matrix of 3 x 5 .* has 60"):
        transport.allocate([(2, 4, 4), (2, 3, 5)], FLOAT, CPU)
    with pytest.raises(InputError, match=r"/dev/shm has .* bytes free"):
        transport.allocate([(1 << 20, 1 << 14, 1 << 10)], FLOAT, CPU)
    dist.barrier()


@pytest.mark.ranks
def test_memory_that_cannot_be_shared_is_refused(four_ranks):
    four_ranks.run(odd_experts)
    assert D * F * 2 % 16 == 0  # what the other cases move
