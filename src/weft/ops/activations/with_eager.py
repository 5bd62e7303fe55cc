"""Activations composed of torch calls in float32; torch.compile fuses them for ``compile``."""

from __future__ import annotations

import math

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.core.implementation import with_invariant


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + torch.tanh(u))


def forward_gelu(x: torch.Tensor) -> torch.Tensor:
    return _tanh_gelu(x.float()).to(x.dtype)


def forward_relu(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x <= 0, 0.0, x)


def forward_bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return _tanh_gelu(x.float() + bias.float()).to(x.dtype).contiguous()


# torch's elementwise functions used here have one code for whole vectors and for the rest (on a CPU); its own
# GELU and SiLU have two. On a GPU Weft's kernels run.
GELU = with_invariant(
    Implementation(
        operator="gelu", name="eager", backend="eager", forward=forward_gelu, idea="eight torch calls"
    ),
    devices=("cpu",),
)
RELU = with_invariant(
    Implementation(
        operator="relu", name="eager", backend="eager", forward=forward_relu, idea="two torch calls"
    ),
    devices=("cpu",),
)
BIAS_GELU = with_invariant(
    Implementation(
        operator="bias_gelu",
        name="eager",
        backend="eager",
        forward=forward_bias_gelu,
        idea="nine torch calls",
    ),
    devices=("cpu",),
)
GELU_COMPILED = compiled(GELU)
RELU_COMPILED = compiled(RELU)
BIAS_GELU_COMPILED = compiled(BIAS_GELU)
