"""A linear layer by cuBLAS, bias in its epilogue; dbias by a pass in CUDA C++, in a fixed order."""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._shared.linear_cuda import SUM, column_sums, specimens
from weft.ops._shared.linear_library import held, products
from weft.ops._shared.linear_spec import rows_of


def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = held(torch.nn.functional.linear, rows_of(x), weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]


def backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    lines = rows_of(grad)
    dbias, _ = column_sums(SUM, lines)
    return (*products(lines, x, weight), dbias)


IMPLEMENTATION = Implementation(
    operator="linear",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=backward,
    specimens=specimens(SUM),
    around="cublas",
    handed=("forward",),
    idea="cuBLAS with its bias epilogue; dbias by our one pass of 16-byte vectors",
)
