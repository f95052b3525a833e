"""Case 32 of what breaks corpora: an index of many documents does not fit in memory."""

import tracemalloc

import numpy as np

from data import plan
from data.dedup import ORDER


def test_planning_takes_no_memory_a_document(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "BLOCK", 10_000)
    rows = np.zeros(1_000_000, dtype=ORDER)
    rows["source"] = np.arange(rows.size) % 2
    rows["bytes"] = 40  # of 4 bytes a token: 11 tokens with the EOS
    rows.tofile(tmp_path / "order")
    order_D = np.memmap(tmp_path / "order", dtype=ORDER, mode="r")
    estimate = plan._Estimate(bytes_a_token=[4.0, 4.0], exact={})
    tracemalloc.start()
    _, shards = plan._deal(order_D, estimate, [3_000_000, 10**9], 110_000, tmp_path / "plan")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**20  # the order alone is 16 MB
    # Source 0 ends with its document 272,728 (of 11 tokens), source 1 is taken whole.
    taken = np.fromfile(tmp_path / "plan", ORDER)
    assert np.bincount(taken["source"]).tolist() == [272_728, 500_000]
    assert shards[0] == (0, 10_000)  # 110,000 tokens
    assert [stop for _, stop in shards[:-1]] == [start for start, _ in shards[1:]]
    assert shards[-1][1] == taken.size
