"""Depthwise causal convolution composed of torch calls: K views of the padded rows, in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.core import Implementation


def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    taps, length = weight.shape[1], x.shape[2]
    padded, coefficients = F.pad(x.float(), (taps - 1, 0)), weight.float()
    y = bias.float()[:, None].expand(x.shape)
    for k in range(taps):
        y = y + coefficients[:, k, None] * padded[..., k : k + length]
    return y.to(x.dtype, memory_format=torch.contiguous_format)


IMPLEMENTATION = Implementation(
    operator="conv1d",
    backend="eager",
    forward=forward,
    idea="K views of the padded rows, multiplied and added",
)
