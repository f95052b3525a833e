"""A rank that dies or hangs in a layer ends the others with an error, and nothing stays behind."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.execution.layer_cases import run_share
from tests.native_library import build_or_skip
from tests.ranks import RankPool
from topoep_titan.execution.one_sided import make_transport

pytestmark = pytest.mark.ranks


def lose_rank_three(
    rank: int, ranks: int, folder: str, name: str, how: str, timeout: float
) -> None:
    """Two layers over the same group; rank 3 does not come to the second one."""
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    transport = make_transport(name, group, 2)
    case = ("dedup-node", 2, "full slots", "hot", torch.float32)
    run_share(transport, *case)
    if rank == 3:
        if how == "dies":
            os._exit(1)
        time.sleep(60)
    started = time.monotonic()
    try:
        run_share(transport, *case)
        outcome = "finished"
    except RuntimeError as error:  # gloo's
        outcome = f"error: {error}"
    with open(f"{folder}/{rank}.tmp", "w") as file:
        file.write(f"{time.monotonic() - started} {outcome}")
    os.rename(f"{folder}/{rank}.tmp", f"{folder}/{rank}")
    os._exit(1)  # as a failed job does: its own partners notice


@pytest.mark.parametrize(
    # Seconds: of the group, and until the survivors end.
    ("transport", "how", "timeout", "least", "most"),
    [
        ("collective", "dies", 45, 0, 20),
        ("collective", "hangs", 3, 2.5, 20),
        ("symm_mem", "hangs", 3, 2.5, 20),
    ],
)
def test_survivors_end_with_an_error(tmp_path, transport, how, timeout, least, most):
    if transport == "symm_mem":
        build_or_skip()
    pool = RankPool(4)
    try:
        pool.start()
        for pipe in pool.pipes:
            pipe.send((lose_rank_three, (str(tmp_path), transport, how, timeout)))
        deadline = time.monotonic() + 60
        while len([path for path in tmp_path.iterdir() if path.suffix == ""]) < 3:
            assert time.monotonic() < deadline, "survivors hang"
            time.sleep(0.05)
    finally:
        processes = pool.processes
        pool.close()
    for rank in range(3):
        seconds, _, outcome = (tmp_path / str(rank)).read_text().partition(" ")
        assert outcome.startswith("error")
        assert least < float(seconds) < most
    for process in processes:
        process.join(10)
        assert not process.is_alive()
