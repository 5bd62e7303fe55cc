"""torch.compile of the library's call: nobody compiles multiply-and-sum of M N K products."""

from __future__ import annotations

from dataclasses import replace

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.ops.matmul.with_torch import IMPLEMENTATION as LIBRARY
from weft.ops.matmul.with_torch import exactly, traced


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b)


_product = compiled(replace(LIBRARY, forward=product)).forward


def forward(a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee") -> torch.Tensor:
    return exactly(_product, a, precision, a, b)  # type: ignore[no-any-return]


def backward(
    grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The compiled product twice: one function of other strides, compiled once for each."""
    return (
        forward(grad, b.t(), precision=precision),
        forward(a.t(), grad, precision=precision),
    )


forward.compiles = traced  # type: ignore[attr-defined]

IMPLEMENTATION = Implementation(
    operator="matmul",
    name="compile",
    backend="compile",
    forward=forward,
    backward=backward,
    supports=LIBRARY.supports,
    idea="torch.compile of torch.mm",
)
