"""A linear layer and a residual in one Triton kernel; see _shared/linear_kernels.py.

The backward's one pass over the gradient sums its columns and copies it: what it returns for the
residual shares no memory with what came in.
"""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._shared.linear_columns import column_sums
from weft.ops._shared.linear_columns import specimens as column_specimens
from weft.ops._shared.linear_configs import RESIDUAL, Config, worth_timing
from weft.ops._shared.linear_library import products
from weft.ops._shared.linear_spec import rows_of
from weft.ops._shared.linear_triton import product, specimens


def candidates(dtype: torch.dtype) -> tuple[Config, ...]:
    """The forward configurations worth timing."""
    return worth_timing(RESIDUAL, dtype)


def forward_with(
    config: Config | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
) -> torch.Tensor:
    """The forward by one configuration; None is the one shipped for these sizes."""
    return product(RESIDUAL, x, weight, bias, residual, config=config)[0]


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    return forward_with(None, x, weight, bias, residual)


def backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """dx and dW by the library's products, db and dresidual by one pass over the gradient."""
    lines = rows_of(grad)
    dbias, dresidual = column_sums(lines, copy=True)
    assert dresidual is not None
    return (*products(lines, x, weight), dbias, dresidual.view(grad.shape))


IMPLEMENTATION = Implementation(
    operator="linear_residual",
    name="triton",
    backend="triton",
    forward=forward,
    backward=backward,
    specimens=(*specimens(RESIDUAL), *column_specimens("copy")),
    around="cublas",
    idea="tensor cores fed by the copy engine; bias and residual in the epilogue",
)
