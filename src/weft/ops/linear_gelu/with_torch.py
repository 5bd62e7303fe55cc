"""A linear layer and GELU by the library.

cuBLAS fuses bias and GELU (tanh form) in its epilogue, which PyTorch offers as
``_addmm_activation``: on a GPU, with no derivative, and without what GELU was of. So it serves
where pre is not kept and no gradient is asked for; else the bias is fused and GELU is a pass.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.core import Implementation
from weft.ops._shared.linear_library import held, products
from weft.ops._shared.linear_spec import rows_of


def _two(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    pre = torch.nn.functional.linear(x, weight, bias)
    return torch.nn.functional.gelu(pre, approximate="tanh"), pre.detach()


def _fused(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    call = torch.ops.aten._addmm_activation
    y: torch.Tensor = call(bias, rows_of(x), weight.t(), use_gelu=True)
    return y.view(*x.shape[:-1], weight.shape[0])


def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, keep: bool = True) -> Any:
    asked = torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, bias))
    if not keep and x.is_cuda and not asked:
        return held(_fused, x, weight, bias)
    both = held(_two, x, weight, bias)
    return both if keep else both[0]


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    kept: torch.Tensor,
    *,
    keep: bool = True,
) -> tuple[torch.Tensor, ...]:
    """``kept`` is pre, or without ``keep`` the bias, with which pre is computed again."""
    pre = kept if keep else held(torch.nn.functional.linear, x, weight, kept)
    dpre = rows_of(torch.ops.aten.gelu_backward(grad, pre, approximate="tanh"))
    return (*products(dpre, x, weight), dpre.sum(0))


def traced(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, keep: bool = True) -> Any:
    """What an outer torch.compile traces: it cannot trace a process-wide switch."""
    both = _two(x, weight, bias)
    return both if keep else both[0]


forward.compiles = traced  # type: ignore[attr-defined]

IMPLEMENTATION = Implementation(
    operator="linear_gelu",
    name="torch",
    backend="torch",
    forward=forward,
    backward=backward,
    idea="cuBLAS with its bias epilogue, then F.gelu; with both fused where pre is not kept",
)
