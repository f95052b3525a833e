"""Every kernel on a GPU against the CPU, bit for bit: ``make test-gpu``. The cases called small
also run under compute-sanitizer."""

import pytest
import torch
from topoep_kernels import rows, transfers

from tests.kernels.test_row_kernels import cases
from tests.kernels.test_transfers import EXPERT_G, MAIN_E, E, R, S, hosted, weights
from tests.native_library import build_or_skip
from tests.planning.test_device_planners import on_device, skewed
from tests.planning.test_native import a_cell
from topoep_titan.planning import NATIVE, device_planner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module", autouse=True)
def _library():
    build_or_skip()


def assert_plans_agree(name, load_RE, cell):
    expected, plan = NATIVE[name](load_RE, **cell), on_device(name, load_RE.cuda(), **cell)
    assert torch.equal(plan.expert_G.cpu(), expected.expert_G)
    assert torch.equal(plan.assignments_RG.cpu(), expected.assignments_RG)


@pytest.mark.parametrize("name", ["topoep", "joint"])
def test_small_plans(name):
    for seed in range(20):
        cell = a_cell(seed)
        assert_plans_agree(name, cell.pop("load_RE"), cell)


@pytest.mark.parametrize("name", ["topoep", "joint"])
@pytest.mark.parametrize("width", [768, 20_000])
@pytest.mark.parametrize(
    "shape", [(32, 640, 8), (128, 1024, 8), (512, 1024, 8), (512, 1024, 64), (72, 144, 72)]
)
def test_published_sizes(name, shape, width):
    assert_plans_agree(name, *skewed(*shape, width))


@pytest.mark.parametrize("name", ["topoep", "joint"])
def test_a_graph_replays_on_other_loads(name):
    (first_RE, cell), (second_RE, _) = skewed(32, 128, 8, 768), skewed(32, 128, 8, 768, seed=8)
    load_RE = first_RE.cuda()
    planner = device_planner(name, load_RE.device, **cell)
    planner(load_RE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = planner(load_RE)
    load_RE.copy_(second_RE)
    graph.replay()
    expected = NATIVE[name](second_RE, **cell)
    assert torch.equal(plan.expert_G.cpu(), expected.expert_G)
    assert torch.equal(plan.assignments_RG.cpu(), expected.assignments_RG)


def test_small_rows():
    for name, arguments in cases():
        on_gpu = [a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments]
        expected = getattr(rows, name)(*arguments)
        results = getattr(rows, name)(*on_gpu)
        if isinstance(expected, torch.Tensor):
            expected, results = (expected,), (results,)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(results, expected, strict=True)), name


def test_small_transfers():
    """R virtual ranks, whose buffers all lie on this GPU."""
    device = torch.device("cuda")
    expert_G, place_E = EXPERT_G.cuda(), transfers.main_places(MAIN_E).cuda()
    every = [w.bfloat16().cuda() for w in weights(0)]
    mains = [[w[(r == MAIN_E).cuda()].contiguous() for w in every] for r in range(R)]
    regions = [[w.new_full((R, E // R, *w.shape[1:]), float("nan")) for w in every] for _ in mains]

    def table(buffers):
        return transfers.addresses(
            [[buffers[r][p].data_ptr() for r in range(R)] for p in range(3)], device
        )

    for rank in range(R):
        slots = [w.new_full((S, *w.shape[1:]), float("nan")) for w in every]
        own = transfers.addresses([s.data_ptr() for s in slots], device), slots[0][0].nbytes
        transfers.pull_replicas(expert_G, place_E, table(mains), *own, rank)
        for slot, expert in hosted(rank):
            for part, weight in zip(slots, every):
                assert torch.equal(part[slot], weight[expert])
        transfers.push_gradients(expert_G, place_E, table(regions), *own, rank)
    for rank in range(R):
        total = torch.zeros_like(mains[rank][0], dtype=torch.float32)
        transfers.reduce_gradients(total, regions[rank][0], expert_G, rank)
        for index, expert in enumerate((rank == MAIN_E).nonzero().flatten().tolist()):
            copies = sum(replica == expert for host in range(R) for _, replica in hosted(host))
            expected = sum([every[0][expert].float()] * copies, torch.zeros_like(total[0]))
            assert torch.equal(total[index], expected)
