"""A linear layer and GELU in one Triton kernel; see _shared/linear_kernels.py.

The epilogue is done on the float32 sums, so that y is rounded once. Its backward: one pass makes
dpre and the sums for dbias, and two products of the library the rest.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.core import Implementation
from weft.ops._shared.linear_columns import column_sums
from weft.ops._shared.linear_columns import specimens as column_specimens
from weft.ops._shared.linear_configs import BIAS, GELU, GELU_KEEP, Config, worth_timing
from weft.ops._shared.linear_library import products
from weft.ops._shared.linear_spec import rows_of
from weft.ops._shared.linear_triton import product, specimens


def candidates(dtype: torch.dtype, keep: bool = True) -> tuple[Config, ...]:
    """The forward configurations worth timing."""
    return worth_timing(GELU_KEEP if keep else GELU, dtype)


def forward_with(
    config: Config | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    keep: bool = True,
) -> Any:
    """The forward by one configuration; None is the one shipped for these sizes."""
    y, pre = product(GELU_KEEP if keep else GELU, x, weight, bias, config=config)
    return (y, pre) if keep else y


def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, keep: bool = True) -> Any:
    return forward_with(None, x, weight, bias, keep=keep)


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    kept: torch.Tensor,
    *,
    keep: bool = True,
) -> tuple[torch.Tensor, ...]:
    """``kept`` is pre, or without ``keep`` the bias, with which pre is computed again."""
    pre = kept if keep else product(BIAS, x, weight, kept)[0]
    dbias, dpre = column_sums(rows_of(grad), rows_of(pre))
    assert dpre is not None
    return (*products(dpre, x, weight), dbias)


IMPLEMENTATION = Implementation(
    operator="linear_gelu",
    name="triton",
    backend="triton",
    forward=forward,
    backward=backward,
    specimens=(*specimens(GELU_KEEP), *column_specimens("slope")),
    around="cublas",
    idea="tensor cores fed by the copy engine; bias and GELU while the next tile is multiplied",
)
