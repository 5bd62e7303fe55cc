"""Autocast: products in its lower dtype, and one dtype in a call.

PyTorch's own calls are lowered by its dispatcher. Our operators validate their arguments first, so the
arguments are cast before that, in traceable torch code: gradients flow back through the casts, and
``torch.compile`` fuses them.
"""

from __future__ import annotations

from typing import Any

import torch

# One test for all kinds of devices: nearly every call ends here.
_is_any_enabled = torch._C._is_any_autocast_enabled


def lowered(*arguments: Any) -> tuple[Any, ...]:
    """Return the arguments with each floating-point tensor in autocast's dtype; for matrix products.

    They are returned unchanged if autocast is off or if the first is no tensor. A float64 tensor is never
    lowered.
    """
    if not _is_any_enabled():
        return arguments
    first = arguments[0]
    if not isinstance(first, torch.Tensor) or not _enabled_for(first):
        return arguments
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(_cast(a, dtype) for a in arguments)


def alike(x: Any, *parameters: Any) -> tuple[Any, ...]:
    """Return ``x`` and the parameters cast to its dtype; for operators that keep their input's dtype.

    Autocast leaves float32 weights beside bfloat16 activations. Nothing changes if autocast is off.
    """
    if not _is_any_enabled():
        return (x, *parameters)
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or not _enabled_for(x):
        return (x, *parameters)
    return (x, *(_cast(p, x.dtype) for p in parameters))


def _enabled_for(x: torch.Tensor) -> bool:
    return x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)


def _cast(a: Any, dtype: torch.dtype) -> Any:
    floating = isinstance(a, torch.Tensor) and a.is_floating_point()
    return a.to(dtype) if floating and a.dtype != torch.float64 else a
