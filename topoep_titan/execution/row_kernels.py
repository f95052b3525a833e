"""Row kernels where they are compiled, else the PyTorch expressions that they equal bit for bit.

On the CPU all but ``combine`` are faster than the expressions (``make bench-kernels``).
"""

from types import ModuleType

import torch
from topoep_kernels import reference, rows
from topoep_kernels.library import is_built


def kernels_for(device: torch.device) -> ModuleType:
    """The module whose ``bucket``, ``assign``, ``gather`` and so on run on ``device``."""
    return rows if is_built(device.type) else reference
