"""A trace of a training step shows both chunks: their tokens on the way, and their experts."""

import gzip
import json

import pytest

from tests.ranks import free_port
from tests.titan.training_cases import train

PHASES = ("dispatch", "experts", "combine", "Dgrad", "Wgrad")


@pytest.mark.ranks
def test_a_trace_of_training_shows_the_two_chunks(trainers, folder):
    port = free_port()
    arguments = [
        "--parallelism.expert-parallel-degree", "2", "--training.local-batch-size", "4",
        "--training.steps", "3", "--topoep.chunks", "2", "--topoep.planner", "topoep",
        "--profiler.enable-profiling", "--profiler.profile-freq", "3",
        "--profiler.profiler-warmup", "1",
    ]  # fmt: skip
    trainers.run(train, 2, port, str(folder), arguments)
    for rank in range(2):
        (path,) = (folder / f"run-{port}").glob(f"profiling/traces/*/rank{rank}_trace.json.gz")
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
        spans = {event["name"] for event in events if event.get("cat") == "user_annotation"}
        assert {f"{phase} c{chunk}" for phase in PHASES for chunk in (1, 2)} <= spans
        assert {"pull", "push"} <= spans  # replicas come and their gradients go
