"""Streams and dependencies by hand, the two-chunk schedule by hand, then what must always hold."""

import numpy as np
import pytest
import torch

from topoep_titan.cluster import load_cluster, modelled_time
from topoep_titan.planning import PLANNERS
from topoep_titan.planning.plan import contiguous_mains
from topoep_titan.planning.workloads import load_of, skew
from topoep_titan.simulator.calibration import backends
from topoep_titan.simulator.layer import Backend, LayerCosts, layer_costs
from topoep_titan.simulator.models import MODELS
from topoep_titan.simulator.step import simulate_step, stage_tasks
from topoep_titan.simulator.timeline import Task, finish, run

QWEN = MODELS["qwen3_30b_a3b_5l"]


def test_streams_and_events_by_hand():
    spans = run(
        [
            Task("a", "compute", np.array([1.0, 3.0])),
            Task("b", "comm", np.array([2.0, 2.0]), ("a",), collective=True),
            Task("c", "compute", np.array([1.0, 1.0])),  # beside b
            Task("d", "compute", np.array([1.0, 1.0]), ("b",)),
        ]
    )
    assert spans["b"].start_R.tolist() == [3, 3]  # the slower rank holds both
    assert spans["c"].end_R.tolist() == [2, 4]
    assert spans["d"].end_R.tolist() == [6, 6]
    assert finish(spans) == 6
    with pytest.raises(KeyError):
        run([Task("a", "compute", np.ones(1), ("later",))])


def test_two_chunk_schedule_by_hand():
    """Experts 4, a token pass 2, a pull 1, planning 0.5 (seconds, one rank), no attention.

    Forward: plan 0.5, pull to 1.5, chunk 1 arrives at 2.5 and runs to 4.5, chunk 2 (arrived at
    3.5) to 6.5, returns at 7.5. Backward, from 7.5: pull to 8.5, chunk 1 arrives at 9.5, input and
    weight gradients 2 + 2 a chunk: to 17.5; chunk 2 returned at 15.5 + 1; the push ends at 18.5.
    """
    costs = LayerCosts(np.full(1, 4.0), np.full(1, 2.0), np.full(1, 1.0), plan=0.5, gather=0.0)
    backend = Backend("two", dispatcher="alltoall", chunks=2)
    spans = run(stage_tasks([costs], backend, attention=0.0))
    ends = {name: float(span.end_R[0]) for name, span in spans.items()}
    assert ends["forward0.pull"] == 1.5
    assert ends["forward0.expert0"] == 4.5
    assert ends["forward0.combine1"] == 7.5
    assert ends["backward0.dgrad0"] == 11.5
    assert ends["backward0.wgrad1"] == 17.5
    assert ends["backward0.combine1"] == 16.5
    assert finish(spans) == 18.5
    # On one stream everything adds up: 12 of experts, 8 of tokens, 3 of copies, 0.5 of planning.
    assert finish(run(stage_tasks([costs], backend, attention=0.0, overlap=False))) == 23.5


@pytest.mark.parametrize("planner", ["none", "topoep", "joint", "eplb"])
@pytest.mark.parametrize("router_skew", [0.0, -4.0])
def test_without_overlap_it_agrees_with_the_closed_form(planner, router_skew):
    """The closed form exposes half of the token passes and one of three copies, and adds NIC and
    NVLink, which the events run side by side: so events / closed form is between 1 and 2 for
    experts and tokens, and at most 3 with copies. Latencies and the gather are left out."""
    cluster = load_cluster("h800_4x8").resized(32)
    quiet = type(cluster)(**{**vars(cluster), "lat_far": 0.0, "lat_near": 0.0})
    load_RE = load_of(skew(128, 8, 32, 1024, router_skew=router_skew, seed=1), 128)
    main_E = contiguous_mains(32, 128)
    plan = PLANNERS[planner](
        load_RE, main_E=main_E, cluster=quiet, model_dims=QWEN.dims, replica_slots=2
    )
    closed = modelled_time(
        plan.expert_G, plan.assignments_RG, main_E=main_E, cluster=quiet, dims=QWEN.dims
    )
    backend = Backend("plain", dispatcher="alltoall", chunks=1)
    costs = layer_costs(
        plan, main_E=main_E, cluster=quiet, dims=QWEN.dims, backend=backend, tokens=1024,
        planned=bool(closed.plan),
    )  # fmt: skip
    serial = finish(run(stage_tasks([costs], backend, 0.0, overlap=False))) - costs.gather
    passes = 4 * costs.token_R.max() + 3 * costs.copy_R.max()
    assert 3 * costs.expert_R.max() == pytest.approx(closed.compute / 1e12, rel=1e-5)
    # A sum of maxima bounds the events: another rank may be the busiest in each part.
    assert serial <= ((closed.compute + closed.plan) / 1e12 + passes) * (1 + 1e-5)
    assert 1 <= serial / (closed.total / 1e12) <= (3 if closed.replica else 2)
    overlapped = finish(run(stage_tasks([costs], backends().chunked, 0.0)))
    assert overlapped <= finish(run(stage_tasks([costs], backends().chunked, 0.0, overlap=False)))


def test_pipeline_bubble_by_hand():
    """Two stages of two equal layers and N microbatches take N + 1 turns."""
    model = type(QWEN)(
        **{**vars(QWEN), "moe_layers": 4, "pipeline": 2, "vocabulary": 0, "name": "two stages"}
    )
    layer = LayerCosts(np.full(4, 1.0), np.full(4, 0.5), np.zeros(4), plan=0.0, gather=0.0)
    settings = {
        "model": model, "cluster": load_cluster("h800_4x8"), "tokens": 1,
        "backend": Backend("plain", dispatcher="alltoall", chunks=1),
    }  # fmt: skip
    one = simulate_step([layer] * 4, microbatches=1, **settings)
    six = simulate_step([layer] * 4, microbatches=6, **settings)
    assert one.total == pytest.approx(2 * 2 * 5.0, rel=1e-4)  # 3 of experts, 2 of tokens a layer
    assert six.total == pytest.approx(7 / 2 * one.total, rel=1e-9)
    assert six.bubble == pytest.approx(one.total / 2, rel=1e-9)
    assert one.moe == pytest.approx(20, rel=1e-4)


def test_dense_flops_by_hand():
    """Qwen3: 18.9 M attention and 0.26 M router parameters a layer, causal scores over 4,096."""
    params = 2048 * 4096 + 2 * 2048 * 512 + 4096 * 2048 + 2048 * 128
    scores = 2 * 2 * 32 * 128 * 4096 / 2  # query-key and score-value products, half of them
    assert QWEN.attention_flops(4096) == pytest.approx(4096 * (2 * params + scores))
    assert torch.tensor(QWEN.head_flops(1)).item() == 2 * 2048 * 151936
