"""NVTX ranges around Weft's own steps, which Nsight Systems shows beside the kernels. No torch at import.

Ranges are made under ``nsys`` and with ``WEFT_NVTX=1``; ``WEFT_NVTX=0`` switches them off. Otherwise
:func:`annotate` returns one shared context that does nothing. No range begins or ends inside a timed sample:
the timing has one range for each of its phases, and a sample lies within its phase.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Protocol

from weft.core import WeftError

SWITCH = "WEFT_NVTX"
UNDER_NSYS = "NSYS_PROFILING_SESSION_ID"  # nsys sets it for the programs that it starts


class NvtxBackend(Protocol):
    """Library that receives the ranges of a thread; ``torch.cuda.nvtx`` is one."""

    def range_push(self, msg: str) -> object: ...

    def range_pop(self) -> object: ...


class _Range:
    """Range from ``__enter__`` to ``__exit__``, which is also called when an exception passes."""

    __slots__ = ("_backend", "_name")

    def __init__(self, backend: NvtxBackend, name: str) -> None:
        self._backend, self._name = backend, name

    def __enter__(self) -> None:
        self._backend.range_push(self._name)

    def __exit__(self, *_: object) -> None:
        self._backend.range_pop()


_NO_RANGE = nullcontext()


def annotate(name: str) -> AbstractContextManager[None]:
    """Return a context that is a range ``name`` of the calling thread if ranges are on.

    Raises :class:`WeftError` for another value of ``WEFT_NVTX`` than 0 and 1, and for 1 if PyTorch has no
    NVTX.
    """
    backend = active_backend()
    return _NO_RANGE if backend is None else _Range(backend, name)


# Cached: without it each annotation would read the environment.
@cache
def active_backend() -> NvtxBackend | None:
    """Return the library that receives ranges, decided once a process; None if ranges are off."""
    switch = os.environ.get(SWITCH, "")
    if switch not in ("", "0", "1"):
        raise WeftError(SWITCH, expected="0 or 1", got=switch)
    if switch == "0" or not (switch or UNDER_NSYS in os.environ):
        return None
    from torch.cuda import nvtx

    try:
        nvtx.mark("weft")  # a build of PyTorch without CUDA has the functions too, and they raise
    except RuntimeError as error:
        if not switch:
            return None  # nsys also traces programs without CUDA, where no kernel could lie in a range
        hint = f"unset {SWITCH}, or install a PyTorch for CUDA"
        raise WeftError(f"{SWITCH}=1", expected="a PyTorch with NVTX", got=error, hint=hint) from error
    backend: NvtxBackend = nvtx
    return backend
