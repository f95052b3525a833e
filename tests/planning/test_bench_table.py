"""The bench's summary from a few rows whose ratios are known."""

import pytest

from topoep_titan.planning.bench_table import summary, summary_lines


def a_row(planner, total, *, router_skew=-1.0, seed=0, best_us=None):
    return {
        "planner": planner, "experts": 8, "top_k": 2, "hidden": 64, "moe_intermediate": 32,
        "ranks": 4, "ranks_per_node": 2, "replica_slots": 2,
        "workload": "zipf" if router_skew is None else "skew", "router_skew": router_skew,
        "seed": seed, "modelled_us": {"total": total}, "best_us": best_us,
    }  # fmt: skip


def test_summary_by_hand():
    rows = [
        # router_skew -1: seed means joint 3, topoep 6, none 12.
        *(a_row("joint", t, seed=s, best_us=2.5) for s, t in enumerate((2.0, 4.0))),
        *(a_row("topoep", t, seed=s) for s, t in enumerate((5.0, 7.0))),
        *(a_row("none", 12.0, seed=s) for s in (0, 1)),
        # router_skew -4: joint 8 over topoep 4; zipf: only none is there.
        a_row("joint", 8.0, router_skew=-4.0, best_us=8.0),
        a_row("topoep", 4.0, router_skew=-4.0),
        a_row("joint", 9.0, router_skew=None),
        a_row("none", 10.0, router_skew=None),
        a_row("joint", 1.0, router_skew=None),  # a second implementation does not count
        a_row("moonep-free", 0.1, router_skew=None),  # nor one out of the rules
    ]
    (cell,) = summary(rows)
    assert cell["over_topoep"] == pytest.approx(1.0)  # geometric mean of 3/6 and 8/4
    assert cell["over_none"] == pytest.approx(0.9)  # worst of 3/12 and 9/10
    assert cell["over_best_other"] == pytest.approx(2.0)  # 8 against topoep's 4
    assert cell["over_milp_best"] == pytest.approx((3 / 2.5 + 8 / 8) / 2)
    assert "1.100" in summary_lines(rows)[-1]
    assert summary_lines([a_row("none", 1.0)]) == []
