"""A linear layer and a residual by cuBLAS's product, bias in its epilogue, and a pass in CUDA C++.

The backward's one pass over the gradient sums its columns and copies it for the residual.
"""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._shared.linear_cuda import COPY, RESIDUAL, column_sums, epilogue, specimens
from weft.ops._shared.linear_library import held, products
from weft.ops._shared.linear_spec import rows_of


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    y = held(torch.nn.functional.linear, rows_of(x), weight, bias)
    epilogue(RESIDUAL, y, rows_of(residual).contiguous(), y)
    return y.view(*x.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]


def backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    lines = rows_of(grad)
    dbias, dresidual = column_sums(COPY, lines)
    assert dresidual is not None
    return (*products(lines, x, weight), dbias, dresidual.view(grad.shape))


IMPLEMENTATION = Implementation(
    operator="linear_residual",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=backward,
    specimens=specimens(RESIDUAL),
    around="cublas",
    idea="cuBLAS's product and bias, then our sum in 16-byte vectors",
)
