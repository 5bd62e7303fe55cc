"""Activations by PyTorch's own functions."""

from __future__ import annotations

from functools import partial

import torch

from weft.core import Implementation


def forward_gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def forward_relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


def forward_bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Add and activate in two kernels; the sum is rounded between them."""
    return torch.nn.functional.gelu(x + bias, approximate="tanh").contiguous()


_gelu = torch._C._nn.gelu
# Nothing is between a repeated call and PyTorch's own function.
forward_gelu.like = lambda inputs, params: partial(_gelu, approximate="tanh")  # type: ignore[attr-defined]
forward_bias_gelu.like = lambda inputs, params: (  # type: ignore[attr-defined]
    (lambda x, bias: _gelu(x + bias, approximate="tanh")) if inputs[0].is_contiguous() else None
)
forward_relu.like = lambda inputs, params: torch.relu  # type: ignore[attr-defined]

GELU = Implementation(
    operator="gelu", name="torch", backend="torch", forward=forward_gelu, idea="F.gelu, approximate='tanh'"
)
RELU = Implementation(operator="relu", name="torch", backend="torch", forward=forward_relu, idea="torch.relu")
BIAS_GELU = Implementation(
    operator="bias_gelu",
    backend="torch",
    forward=forward_bias_gelu,
    idea="F.gelu(x + bias, approximate='tanh')",
)
