"""Convolution by the library: ``F.conv2d``, and ``aten::convolution_backward``.

float32's gradients are computed in float64. The library adds a weight's gradient in one float32 lane on a
CPU: at 4096 pixels it was off by 2.7 times what the check allows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.core import YES, Case, Implementation, Support, no
from weft.ops._common.layout import contiguous_like


def forward(x: torch.Tensor, weight: torch.Tensor, *, padding: int = 0) -> torch.Tensor:
    return F.conv2d(x, weight, padding=padding).contiguous()


def backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, padding: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both gradients by one call of the library."""
    if grad.numel() == 0:
        return contiguous_like(x).zero_(), contiguous_like(weight).zero_()
    return _gradients(grad, x, weight, padding, [True, True, False])  # type: ignore[return-value]


def weight_gradient(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, padding: int) -> torch.Tensor:
    """Return the gradient of the weight alone; ``grad`` has elements."""
    return _gradients(grad, x, weight, padding, [False, True, False])[0]


def _gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, padding: int, mask: list[bool]
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of ``mask`` (images, weight, bias)."""
    wide = torch.float64 if x.dtype == torch.float32 else x.dtype
    tensors = (grad.to(wide), x.to(wide), weight.to(wide))
    # The library may otherwise add in the order in which blocks arrive.
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        gradients = torch.ops.aten.convolution_backward(
            *tensors, None, [1, 1], [padding] * 2, [1, 1], False, [0, 0], 1, mask
        )
    asked = [g for g in gradients if g is not None]
    return tuple(g.to(x.dtype, memory_format=torch.contiguous_format) for g in asked)


def supports(case: Case, device: str) -> Support:
    """Refuse float32 in tf32, with 11 bits of each factor, and values that the library's kernels spread."""
    if any(i.values == "special" for i in case.inputs):
        return no("the library multiplies sums of several pixels (Winograd), where an Inf becomes NaN")
    if device == "cuda" and case.dtype == "float32" and torch.backends.cudnn.allow_tf32:
        return no("float32 is multiplied in tf32 here: set torch.backends.cudnn.allow_tf32 = False")
    return YES


IMPLEMENTATION = Implementation(
    operator="conv2d",
    backend="torch",
    forward=forward,
    backward=backward,
    supports=supports,
    deterministic=False,  # the library chooses how it adds a weight's gradient
    idea="F.conv2d",
)
