"""Ceilings of the device, with Weft's own kernels among those that try to reach them.

A ceiling is the best that a device reaches, and the best reader need not be torch's sum. Measured
with torch alone, a better kernel would seem to beat the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft import machine
from weft.backends import backend_support
from weft.core import Ceilings, registry


def ceilings(kind: str | None = None, **options: Any) -> Ceilings | None:
    """Return :func:`weft.machine.ceilings` with these ``options`` and Weft's readers."""
    return machine.ceilings(kind, readers=_readers, **options)


def _readers() -> list[Callable[..., Any]]:
    """Return Weft's kernels that read a large float32 tensor once and work on this GPU."""
    return [
        registry.implementation("sum", name).forward
        for name in ("cuda", "triton")
        if backend_support(name, "cuda")
    ]
