"""A linear layer by cuBLAS's product and CUDA C++: the bias added in place, dbias by a pass."""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._shared.linear_cuda import BIAS, SUM, column_sums, epilogue, specimens
from weft.ops._shared.linear_library import held, products
from weft.ops._shared.linear_spec import rows_of


def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = held(torch.mm, rows_of(x), weight.t())
    epilogue(BIAS, y, bias.contiguous(), y)
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
    specimens=specimens(BIAS),
    around="cublas",
    idea="cuBLAS's product, then our bias in 16-byte vectors",
)
