"""The library's products for the linear operators, held to the operators' contract.

float32 in float32, and half types summed in float32 to the end: by default a product that cuBLAS
splits along K may add its parts in the half type, a second rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.ops._shared.linear_spec import rows_of

SWITCH: dict[torch.dtype, tuple[str, Any]] = {
    torch.float32: ("fp32_precision", "ieee"),
    torch.float16: ("allow_fp16_reduced_precision_reduction", False),
    torch.bfloat16: ("allow_bf16_reduced_precision_reduction", False),
}


def held(function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """``function(*tensors)`` with cuBLAS held to the contract for the length of the call."""
    if not tensors[0].is_cuda:
        return function(*tensors)
    switches = torch.backends.cuda.matmul
    name, wanted = SWITCH[tensors[0].dtype]
    before = getattr(switches, name)
    if before == wanted:
        return function(*tensors)
    setattr(switches, name, wanted)
    try:
        return function(*tensors)
    finally:
        setattr(switches, name, before)


def _both(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    lines = rows_of(x)
    dx = torch.mm(grad, weight)
    return dx.view(x.shape), torch.mm(grad.t(), lines)


def products(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx = grad W, of x's shape, and dW = grad^T x, for grad (M, N), x (..., K), weight (N, K)."""
    return held(_both, grad, x, weight)  # type: ignore[no-any-return]
