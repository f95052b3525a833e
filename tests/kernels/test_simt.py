"""The SIMT machine accepts right kernels under every schedule, and reports each planted mistake."""

import pytest
import torch

from tests.kernels.simt_machine import SCHEDULES, SimtError, counters, schedule, selftest
from tests.native_library import build_or_skip

# As numbered in csrc/device/simt_selftest.cu.
REVERSE, NO_BARRIER, DIVERGENT, EARLY_EXIT, FORGOTTEN, EXITED, OVERLAP, MIXED = range(8)
HALVES, SUMS, FOREVER, COPY, COPY_NO_WAIT, COPY_NO_READ_WAIT, MISALIGNED = range(8, 15)
THREADS = 96


@pytest.fixture(scope="module", autouse=True)
def _library():
    build_or_skip()


@pytest.fixture
def values():
    return torch.randint(0, 1000, (THREADS,), generator=torch.Generator().manual_seed(3)).int()


def under_every_schedule(case: int, values: torch.Tensor) -> list[torch.Tensor]:
    results = []
    for seed, name in enumerate(SCHEDULES):
        with schedule(name, seed):
            results.append(selftest(case, values))
    return results


def test_a_block_reverses_through_shared_memory(values):
    for out in under_every_schedule(REVERSE, values):
        assert torch.equal(out[:THREADS], values.flip(0))
    assert counters()["barriers"] == 1


def test_a_missing_barrier_shows_as_poison_in_every_schedule(values):
    poison = torch.tensor(0xCDCDCDCD - (1 << 32), dtype=torch.int32)
    results = under_every_schedule(NO_BARRIER, values)
    for out in results:
        assert (out[:THREADS] == poison).any()
    # Forward, the lower half reads before the upper half writes; in reverse, the other way round.
    assert (results[0][: THREADS // 2] == poison).all()
    assert torch.equal(results[0][THREADS // 2 : THREADS], values[: THREADS // 2].flip(0))
    assert (results[1][THREADS // 2 : THREADS] == poison).all()


def test_collectives_by_arithmetic(values):
    warps = values.view(-1, 32)
    sums = warps.cumsum(1)
    odd = (warps % 2 * 2 ** torch.arange(32)).sum(1, keepdim=True).expand(-1, 32)
    alike = ((warps[:, :, None] // 4 == warps[:, None, :] // 4) * 2 ** torch.arange(32)).sum(2)
    least = warps.min(1, keepdim=True).values.expand(-1, 32)
    expected = torch.stack([sums, odd, alike, least], 2).flatten()
    for out in under_every_schedule(SUMS, values):
        assert torch.equal(out.long() & 0xFFFFFFFF, expected)


def test_disjoint_masks_of_one_warp_do_not_mix(values):
    expected = values.view(-1, 16).sum(1, keepdim=True).expand(-1, 16).flatten()
    for out in under_every_schedule(HALVES, values):
        assert torch.equal(out[:THREADS].long(), expected)


@pytest.mark.parametrize("order", SCHEDULES)
@pytest.mark.parametrize(
    ("case", "message"),
    [
        (DIVERGENT, "divergent barriers: thread .* waits in simt_selftest.cu:.*, thread"),
        (EARLY_EXIT, "exited"),
        (FORGOTTEN, "mask leaves it out"),
        (EXITED, "names lane 0, which is not running|for lane 0"),
        (OVERLAP, "masks overlap|names lane .*, which is not running"),
        (MIXED, "different collectives: simt_selftest.cu:.* and simt_selftest.cu"),
        (FOREVER, r"thread 0 waits in pause\(\)"),
        (MISALIGNED, "not multiples of 16"),
    ],
)
def test_mistakes_are_reported_and_do_not_hang(order, case, message, values):
    with schedule(order, 5), pytest.raises(SimtError, match=message):
        selftest(case, values)
    assert torch.equal(selftest(REVERSE, values)[:THREADS], values.flip(0))  # and nothing is left


def test_bulk_copies_arrive_when_they_are_waited_for(values):
    for out in under_every_schedule(COPY, values):
        assert torch.equal(out[:THREADS], values + 1)
    assert counters()["bulk_copies"] == 2


def test_forgotten_waits_of_bulk_copies_show(values):
    for out in under_every_schedule(COPY_NO_WAIT, values):
        assert not torch.equal(out[:THREADS], values + 1)
    for out in under_every_schedule(COPY_NO_READ_WAIT, values):
        assert out[0] == -1
        assert torch.equal(out[1:THREADS], (values + 1)[1:])
