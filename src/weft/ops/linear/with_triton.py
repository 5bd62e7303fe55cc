"""A linear layer in Triton: the bias is added to the float32 sums (_shared/linear_kernels.py)."""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._shared.linear_columns import column_sums
from weft.ops._shared.linear_columns import specimens as column_specimens
from weft.ops._shared.linear_configs import BIAS, Config, worth_timing
from weft.ops._shared.linear_library import products
from weft.ops._shared.linear_spec import rows_of
from weft.ops._shared.linear_triton import product, specimens


def candidates(dtype: torch.dtype) -> tuple[Config, ...]:
    """The forward configurations worth timing."""
    return worth_timing(BIAS, dtype)


def forward_with(
    config: Config | None, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """The forward by one configuration; None is the one shipped for these sizes."""
    return product(BIAS, x, weight, bias, config=config)[0]


def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return forward_with(None, x, weight, bias)


def backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """dx and dW by the library's products, db by a pass over the gradient in a fixed order."""
    lines = rows_of(grad)
    dbias, _ = column_sums(lines)
    return (*products(lines, x, weight), dbias)


IMPLEMENTATION = Implementation(
    operator="linear",
    name="triton",
    backend="triton",
    forward=forward,
    backward=backward,
    specimens=(*specimens(BIAS), *column_specimens("sum")),
    around="cublas",
    idea="tensor cores fed by the copy engine, the bias in the epilogue",
)
