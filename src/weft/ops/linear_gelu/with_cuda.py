"""A linear layer and GELU by cuBLAS's product, bias in its epilogue, and GELU in CUDA C++.

The backward's pass makes dpre and the partial sums for dbias at once. Without pre kept GELU is
done in place.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.core import Implementation
from weft.ops._shared.linear_cuda import GELU, SLOPE, column_sums, epilogue, specimens
from weft.ops._shared.linear_library import held, products
from weft.ops._shared.linear_spec import rows_of


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return held(torch.nn.functional.linear, rows_of(x), weight, bias)  # type: ignore[no-any-return]


def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, keep: bool = True) -> Any:
    shape = (*x.shape[:-1], weight.shape[0])
    pre = _product(x, weight, bias)
    if not keep:
        return epilogue(GELU, pre, None, pre).view(shape)
    return epilogue(GELU, pre, None, torch.empty_like(pre)).view(shape), pre.view(shape)


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    kept: torch.Tensor,
    *,
    keep: bool = True,
) -> tuple[torch.Tensor, ...]:
    """``kept`` is pre, or without ``keep`` the bias, with which pre is computed again."""
    pre = rows_of(kept) if keep else _product(x, weight, kept)
    dbias, dpre = column_sums(SLOPE, rows_of(grad), pre)
    assert dpre is not None
    return (*products(dpre, x, weight), dbias)


IMPLEMENTATION = Implementation(
    operator="linear_gelu",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=backward,
    specimens=specimens(GELU),
    around="cublas",
    idea="cuBLAS's product and bias, then our GELU in 16-byte vectors",
)
