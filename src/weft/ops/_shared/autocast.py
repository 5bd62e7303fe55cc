"""What ``torch.autocast`` asks of an operator: products in its lower dtype, and one dtype a call.

PyTorch's own calls are lowered by its dispatcher. An operator of ours validates its arguments
first, so that they are cast before, in traceable torch code: gradients flow back through the casts,
and ``torch.compile`` fuses them.
"""

from __future__ import annotations

from typing import Any

import torch


def lowered(*arguments: Any) -> tuple[Any, ...]:
    """The arguments with each floating tensor in autocast's dtype, where autocast is on; as they
    are where it is off or where the first is no tensor, and float64 always. For operators of matrix
    products."""
    first = arguments[0]
    if not isinstance(first, torch.Tensor) or not _on(first):
        return arguments
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(_cast(a, dtype) for a in arguments)


def alike(x: Any, *parameters: Any) -> tuple[Any, ...]:
    """``x`` and parameters in its dtype, where autocast is on: a float32 weight beside a bfloat16
    activation. As they are where it is off. For operators that keep their input's dtype."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or not _on(x):
        return (x, *parameters)
    return (x, *(_cast(p, x.dtype) for p in parameters))


def _on(x: torch.Tensor) -> bool:
    return x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)


def _cast(a: Any, dtype: torch.dtype) -> Any:
    floating = isinstance(a, torch.Tensor) and a.is_floating_point()
    return a.to(dtype) if floating and a.dtype != torch.float64 else a
