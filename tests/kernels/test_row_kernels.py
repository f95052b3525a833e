"""Row kernels: native, and on the device thread by thread, are what the PyTorch expressions say."""

import pytest
import torch
from topoep_kernels import reference, rows, rows_device

from tests.kernels.simt_machine import SCHEDULES, schedule
from tests.native_library import build_or_skip


@pytest.fixture(scope="module", autouse=True)
def _library():
    build_or_skip()


def drawn(*shape, high, seed=0):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def test_bucket_and_dedup_by_hand():
    order, offset = rows.bucket(torch.tensor([2, 0, 2, 1, 0]), 4)
    assert order.tolist() == [1, 4, 3, 0, 2]
    assert offset.tolist() == [0, 2, 3, 5, 5]
    # Tokens 0 0 1 1, targets 1 1 0 1: target 0 gets token 1; target 1 token 0 once, and token 1.
    order, pair, index = rows.dedup(torch.tensor([1, 1, 0, 1]), torch.tensor([0, 0, 1, 1]), 2, 3)
    assert order.tolist() == [2, 0, 1, 3]
    assert pair.tolist() == [0, 1, 1, 2]
    assert index.tolist() == [1, 0, 1]


def test_assign_by_hand():
    """Expert 1 sits in slots 1 and 2, its four assignments are cut 1 + 3; slot 3 is empty."""
    ids = torch.tensor([[1, 0], [1, 2], [1, 1]])
    expert_G = torch.tensor([0, 1, 1, -1, 2], dtype=torch.int32)
    split_G = torch.tensor([1, 1, 3, 0, 1], dtype=torch.int32)
    assert rows.assign(ids, expert_G, split_G, 3).tolist() == [[1, 0], [2, 4], [2, 2]]


def test_combine_rounds_once():
    """256 + 1 is 256 in bfloat16; eight ones and 256 are 264."""
    many = torch.tensor([[256.0], *[[1.0]] * 8]).bfloat16()
    out = rows.combine(many, torch.arange(9), torch.tensor([0, 9, 9]))
    assert out.flatten().tolist() == [264, 0]


def a_plan(seed: int, experts: int, tokens: int, top_k: int):
    """ids of one source, and slots with a split of its assignments over two instances."""
    ids_TK = drawn(tokens, top_k, high=experts, seed=seed)
    count_E = torch.bincount(ids_TK.flatten(), minlength=experts)
    second_E = count_E // 3
    expert_G = torch.cat([torch.arange(experts), torch.tensor([-1]), torch.arange(experts)]).int()
    split_G = torch.cat([count_E - second_E, torch.tensor([0]), second_E]).int()
    return ids_TK, expert_G, split_G, experts


def cases():
    """(name, arguments): sizes around a warp, a chunk and nothing at all."""
    for n, buckets in ((0, 3), (1, 1), (31, 4), (1024, 640), (3000, 7)):
        yield "bucket", (drawn(n, high=buckets, seed=n), buckets)
    for tokens in (0, 5, 400):
        yield "assign", a_plan(tokens, experts=40, tokens=tokens, top_k=8)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int32):
        for width in (1, 8, 100):
            source = (torch.randn(50, width) * 100).to(dtype)
            yield "gather", (source, drawn(77, high=50, seed=width))
            if dtype == torch.int32:
                continue
            order, offset = reference.bucket(drawn(60, high=20, seed=width), 20)
            yield "combine", (source[:20].repeat(3, 1), order, offset)
            wide = torch.promote_types(dtype, torch.float32)
            weight = torch.rand(60, dtype=wide, generator=torch.Generator().manual_seed(width))
            yield "combine", (source[:20].repeat(3, 1), order, offset, weight)
    for tokens, top_k, targets in ((0, 2, 4), (3, 8, 2), (300, 6, 8)):
        target = drawn(tokens, top_k, high=targets, seed=tokens)
        row = torch.arange(tokens).repeat_interleave(top_k)
        distinct = len({*zip(target.flatten().tolist(), row.tolist())})
        yield "dedup", (target.flatten(), row, targets, distinct)
        yield "count_rows", (target * 3 + 1, targets, 3)


def alike(results, expected) -> bool:
    pairs = zip(results, expected) if isinstance(expected, tuple) else [(results, expected)]
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


def test_native_and_device_kernels_are_the_reference_bit_for_bit():
    ran = set()
    for i, (name, arguments) in enumerate(cases()):
        expected = getattr(reference, name)(*arguments)
        assert alike(getattr(rows, name)(*arguments), expected), (name, i)
        for order in SCHEDULES:
            with schedule(order, i):
                assert alike(getattr(rows_device, name)(*arguments), expected), (name, i, order)
        ran.add(name)
    assert ran == {"bucket", "assign", "gather", "combine", "dedup", "count_rows"}


OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def test_operators_pass_opcheck():
    seen = {}
    for name, arguments in cases():
        if arguments[0].numel() > 0:
            seen[name, len(arguments)] = (name, arguments)
    for name, arguments in seen.values():
        if name in ("gather", "combine"):
            values = arguments[0].double().requires_grad_()
            weights = [w.double().requires_grad_() for w in arguments[3:]]
            if name == "combine" and not weights:
                weights = [None]
            arguments = (values, *arguments[1:3], *weights)
        torch.library.opcheck(
            getattr(torch.ops.topoep, name).default, arguments, test_utils=OPCHECKS
        )


def test_gradients_are_the_transposes():
    source = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([5, 0, 5, 2])
    assert torch.autograd.gradcheck(lambda s: rows.gather(s, index), (source,))
    order, offset = rows.bucket(torch.tensor([1, 0, 1, 1, 2, 0]), 4)
    weight = torch.rand(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r: rows.combine(r, order, offset), (source,))
    assert torch.autograd.gradcheck(
        lambda r, w: rows.combine(r, order, offset, w), (source, weight)
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda: rows.bucket(torch.tensor([0, 4]), 4),
        lambda: rows.bucket(torch.tensor([-1]), 4),
        lambda: rows.gather(torch.ones(3, 2), torch.tensor([3])),
        lambda: rows.combine(torch.ones(3, 2), torch.tensor([7]), torch.tensor([0, 1])),
        lambda: rows.dedup(torch.tensor([0, 1]), torch.tensor([0, 0]), 2, 3),
        lambda: rows.assign(
            torch.tensor([[0, 0]]), torch.tensor([0]).int(), torch.tensor([1]).int(), 1
        ),
        lambda: rows.count_rows(torch.tensor([[9]]), 3, 3),
    ],
)
def test_contradictions_are_refused_on_the_cpu(call):
    with pytest.raises(ValueError, match="outside its range"):
        call()


def test_combine_names_what_it_sums():
    with pytest.raises(ValueError, match="float32, bfloat16 or float64"):
        rows.combine(torch.ones(2, 2).half(), torch.arange(2), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="weights must be"):
        rows.combine(torch.ones(2, 2), torch.arange(2), torch.tensor([0, 2]), torch.ones(3))
