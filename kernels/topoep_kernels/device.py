"""Launches the GPU kernels: on the current stream of CUDA tensors; for CPU tensors, in the SIMT
machine of the CPU library, which is for tests and takes a thousand times as long.

Every C function takes pointers and 64-bit integers, a stream at the end, and returns an error code.
"""

from ctypes import CDLL, c_char_p, c_int, c_longlong, c_void_p

import torch
from torch import Tensor

from topoep_kernels.library import cpu_library, cuda_library

TOO_LARGE = -1  # device::kTooLarge of include/device.h


class LaunchError(RuntimeError):
    """A kernel was not launched, or (in the SIMT machine) made a mistake."""


def launch(name: str, *arguments: Tensor | int | None) -> None:
    """Call ``topoep_device_<name>``. Tensors must be contiguous, alike in device, and live on.

    Raises LaunchError, and ValueError when the shape's state does not fit into shared memory.
    """
    device = next(a.device for a in arguments if isinstance(a, Tensor))
    library = library_of(device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    code = getattr(library, f"topoep_device_{name}")(
        *[_argument(a, device) for a in arguments], c_void_p(stream)
    )
    if code == TOO_LARGE:
        sizes = [tuple(a.shape) for a in arguments if isinstance(a, Tensor)]
        raise ValueError(f"{name}: shapes {sizes} need more shared memory than a block has")
    if code:
        raise LaunchError(f"{name}: {_message(library, code)}")


def library_of(device: torch.device) -> CDLL:
    """The library that launches on ``device``."""
    return cuda_library() if device.type == "cuda" else cpu_library()


def _argument(value: Tensor | int | None, device: torch.device) -> c_void_p | c_longlong:
    if value is None:
        return c_void_p(None)
    if not isinstance(value, Tensor):
        return c_longlong(value)
    if value.device != device or not value.is_contiguous():
        raise ValueError(f"tensors must be contiguous on {device}, got one on {value.device}")
    return c_void_p(value.data_ptr())


def _message(library: CDLL, code: int) -> str:
    message = library.topoep_device_error
    message.restype = c_char_p
    return message(c_int(code)).decode()
