"""torchtitan's profiler, whose traces also show the thread that a CPU's communication runs in."""

from dataclasses import dataclass

from torch._C._profiler import _ExperimentalConfig
from torchtitan.tools.profiler import Profiler

from topoep_titan.titan.device import on_cpu


class LaneProfiler(Profiler):
    """On a GPU it is torchtitan's own: the lane is a stream there, and issued by the main thread.

    On a CPU a profile that begins at a run's first step (``profile_freq`` = warm-up + active steps)
    lacks that thread in its first trace.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Profiler.Config):
        pass

    def build_torch_profiler(self, **where):
        profiler = super().build_torch_profiler(**where)
        if profiler is not None and on_cpu():
            profiler.experimental_config = _ExperimentalConfig(profile_all_threads=True)
        return profiler
