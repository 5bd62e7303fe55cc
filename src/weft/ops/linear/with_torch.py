"""A linear layer by the library: cuBLAS adds the bias in its own epilogue."""

from __future__ import annotations

import torch

from weft.core import Implementation
from weft.ops._shared.linear_library import held, products
from weft.ops._shared.linear_spec import rows_of


def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return held(torch.nn.functional.linear, x, weight, bias)  # type: ignore[no-any-return]


def backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    lines = rows_of(grad)
    return (*products(lines, x, weight), lines.sum(0))


# What an outer torch.compile traces: it cannot trace a process-wide switch.
forward.compiles = torch.nn.functional.linear  # type: ignore[attr-defined]

IMPLEMENTATION = Implementation(
    operator="linear",
    name="torch",
    backend="torch",
    forward=forward,
    backward=backward,
    idea="F.linear: cuBLAS with its bias epilogue",
)
