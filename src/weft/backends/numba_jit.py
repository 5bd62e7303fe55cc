"""numba: ``numba.cuda`` on a GPU, its simulator where there is none, ``njit`` on a CPU.

Whether ``numba.cuda`` is simulated is decided when numba is first imported: see environment.py.
Import ``numba`` and ``cuda`` from here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy

if not hasattr(numpy, "row_stack"):
    # numpy 2.5 dropped this alias of vstack; numba-cuda up to 0.29 names it while it is imported.
    numpy.row_stack = numpy.vstack  # type: ignore[attr-defined]

import numba
from numba import cuda

SIMULATED = bool(numba.config.ENABLE_CUDASIM)

__all__ = ["SIMULATED", "NumbaAotKernel", "array", "compile_aot_kernel", "cuda", "launch", "numba"]


@dataclass(frozen=True, kw_only=True)
class NumbaAotKernel:
    """A ``numba.cuda`` kernel with argument types, e.g. ``float32[::1], float32[::1]``."""

    label: str
    kernel: Any
    signature: str
    min_arch: int = 80


def array(tensor: Any) -> Any:
    """Return a tensor as numba takes it, without a copy: a device array, or numpy in the simulator."""
    tensor = tensor.detach()
    return tensor.numpy() if SIMULATED else cuda.as_cuda_array(tensor)


def launch(kernel: Any, grid: Any, block: Any, *arguments: Any, shared: int = 0) -> None:
    """Launch on the current device, on PyTorch's current stream there."""
    if SIMULATED:
        kernel[grid, block, 0, shared](*arguments)
        return
    import torch

    current = torch.cuda.current_stream()
    stream = _stream(current.cuda_stream, current.device_index)
    kernel[grid, block, stream, shared](*arguments)


@lru_cache(maxsize=1024)
def _stream(handle: int, device: int) -> Any:
    """Return numba's object for a stream, which is bound to the current context: that of ``device``.

    Handle 0 is the default stream of every device.
    """
    return cuda.external_stream(handle)


def compile_aot_kernel(aot_kernel: NumbaAotKernel, arch: int, *, lines: bool = False) -> str:
    """The kernel's PTX for ``sm_<arch>``, with no GPU; ``lines``: with its source lines.

    Raises RuntimeError in a process that simulates: use a fresh one with NUMBA_ENABLE_CUDASIM=0.
    """
    if SIMULATED:
        raise RuntimeError("this process simulates numba.cuda; set NUMBA_ENABLE_CUDASIM=0")
    from numba.core import types

    names = {n: getattr(types, n) for n in dir(types)}
    arguments = eval(f"({aot_kernel.signature},)", {"__builtins__": {}}, names)
    function: Callable[..., Any] = getattr(aot_kernel.kernel, "py_func", aot_kernel.kernel)
    target = (arch // 10, arch % 10)
    ptx, _ = cuda.compile_ptx(function, arguments, cc=target, lineinfo=lines)
    return str(ptx)
