"""``mlp_gelu`` by the kernels of the linear family in Triton: the slope is a pass with the column sums."""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._common.column_sums import aot_column_kernels, column_sums
from weft.ops.linear.configs import BIAS, GELU_KEEP
from weft.ops.linear.products import backward_products, to_2d
from weft.ops.linear.with_triton import aot_product_kernels, product


def forward(
    x: torch.Tensor,
    fc_weight: torch.Tensor,
    fc_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    hidden, pre = product(GELU_KEEP, x, fc_weight, fc_bias)
    assert pre is not None
    return product(BIAS, hidden, proj_weight, proj_bias)[0], hidden, pre


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    fc_weight: torch.Tensor,
    proj_weight: torch.Tensor,
    hidden: torch.Tensor,
    pre: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    grad2d = to_2d(grad)
    dproj_bias, _ = column_sums(grad2d)
    dhidden, dproj_weight = backward_products(grad2d, hidden, proj_weight)
    dfc_bias, dpre = column_sums(to_2d(dhidden), to_2d(pre))
    assert dpre is not None
    dx, dfc_weight = backward_products(dpre, x, fc_weight)
    return dx, dfc_weight, dfc_bias, dproj_weight, dproj_bias


IMPLEMENTATION = Implementation(
    operator="mlp_gelu",
    backend="triton",
    forward=forward,
    backward=backward,
    aot_kernels=(
        *aot_product_kernels(GELU_KEEP),
        *aot_product_kernels(BIAS),
        *aot_column_kernels("sum"),
        *aot_column_kernels("slope"),
    ),
    wraps_library="cublas",
    idea="tensor cores fed by the copy engine, GELU in the epilogue; its slope with the bias gradient",
)
