"""``mlp_gelu`` by the library: cuBLAS adds the biases in its epilogue, GELU and its slope are passes.

``forward.compiles`` is the function that an outer ``torch.compile`` traces: it cannot trace the process-wide
switch of ``call_at_precision``.
"""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._common.cublas import call_at_precision
from weft.ops.linear.products import backward_products, to_2d


def _mlp(
    x: torch.Tensor,
    fc_weight: torch.Tensor,
    fc_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    pre = torch.nn.functional.linear(x, fc_weight, fc_bias)
    hidden = torch.nn.functional.gelu(pre, approximate="tanh")
    return torch.nn.functional.linear(hidden, proj_weight, proj_bias), hidden.detach(), pre.detach()


def forward(
    x: torch.Tensor,
    fc_weight: torch.Tensor,
    fc_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    return call_at_precision(_mlp, x, "ieee", x, fc_weight, fc_bias, proj_weight, proj_bias)  # type: ignore[no-any-return]


forward.compiles = _mlp  # type: ignore[attr-defined]


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    fc_weight: torch.Tensor,
    proj_weight: torch.Tensor,
    hidden: torch.Tensor,
    pre: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    grad2d = to_2d(grad)
    dhidden, dproj_weight = backward_products(grad2d, hidden, proj_weight)
    dpre = to_2d(torch.ops.aten.gelu_backward(dhidden, pre, approximate="tanh"))
    dx, dfc_weight = backward_products(dpre, x, fc_weight)
    return dx, dfc_weight, dpre.sum(0), dproj_weight, grad2d.sum(0)


IMPLEMENTATION = Implementation(
    operator="mlp_gelu",
    backend="torch",
    forward=forward,
    backward=backward,
    idea="cuBLAS with its bias epilogue, and F.gelu between",
)
