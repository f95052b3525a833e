"""Communication runs beside computation, in order, and its errors reach the caller."""

import threading
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.execution.layer_cases import run_share
from topoep_titan.execution import pipeline
from topoep_titan.execution.lane import ThreadLane
from topoep_titan.execution.loopback import Loopback


def test_calls_run_in_order_beside_the_caller():
    lane, gate, order = ThreadLane(), threading.Event(), []
    first = lane.submit("a", lambda: (gate.wait(10), order.append("first")))
    second = lane.submit("b", lambda x: order.append("second") or x + 1, 41)
    order.append("caller")  # the lane is still at the gate
    gate.set()
    assert second.result() == 42
    first.result()
    assert order == ["caller", "first", "second"]


def test_errors_surface_where_the_result_is_wanted():
    lane = ThreadLane()

    def broken():
        raise ConnectionError("peer died")

    failed, fine = lane.submit("a", broken), lane.submit("b", lambda: 1)
    with pytest.raises(ConnectionError, match="peer died"):
        failed.result()
    assert fine.result() == 1


def test_gradients_are_off_in_the_lane():
    x = torch.ones(2, requires_grad=True)
    assert not ThreadLane().submit("a", lambda t: t * 2, x).result().requires_grad


def slowed(call, seconds: float):
    def slow(*arguments):
        time.sleep(seconds)
        return call(*arguments)

    return slow


def test_profile_shows_the_two_chunk_pipeline(monkeypatch):
    """Paper, Figures 7 and 8: while one chunk is computed the other travels, and token gradients
    leave before Wgrad. Slow exchanges and slow experts, so that order and not luck decides."""
    for name in ("experts_forward", "experts_dgrad", "experts_wgrad"):
        monkeypatch.setattr(pipeline, name, slowed(getattr(pipeline, name), 0.04))
    transport = Loopback(1).transport()
    transport.exchange = slowed(transport.exchange, 0.02)
    everything = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everything) as profiler:
        run_share(transport, "alltoall", 2, "none", "hot", torch.float32)
    spans = {}
    for event in profiler.events():
        spans.setdefault(event.name, []).append((event.time_range.start, event.time_range.end))
    spans = {name: sorted(times) for name, times in spans.items()}

    def together(one: str, other: str, time: int) -> bool:
        (begin, end), (start, stop) = spans[one][time], spans[other][time]
        return max(begin, start) < min(end, stop)

    forward, backward = 0, -1  # a name is used once in each
    assert together("dispatch c2", "experts c1", forward)
    assert together("combine c1", "experts c2", forward)
    assert together("dispatch c2", "Dgrad c1", backward)
    assert together("combine c1", "Wgrad c1", backward)
    assert spans["Dgrad c1"][0][1] <= spans["combine c1"][backward][0]
