"""The device's ceilings, with our own kernels among those that try to reach them.

A ceiling is what the device reaches *at best*, and the best reader may not be torch's sum: judged
by torch's alone, a better kernel would seem to beat the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft import machine
from weft.core import Ceilings


def ceilings(kind: str | None = None, **options: Any) -> Ceilings | None:
    """As :func:`weft.machine.ceilings`, whose ``options`` these are."""
    return machine.ceilings(kind, readers=_readers, **options)


def _readers() -> list[Callable[..., Any]]:
    """Every way of ours to read a large float32 tensor once, as far as it works on this GPU."""
    from weft.backends import backend_support
    from weft.core import registry

    return [
        registry.implementation("sum", name).forward
        for name in ("cuda", "triton")
        if backend_support(name, "cuda")
    ]
