"""Convolution composed of torch calls: the naive sum, one term a step, in float32 and rounded once.

It is what a thread with one float32 sum computes. A product over the channels for each place of the window is
faster and adds in shorter chains: kernels with one sum would then seem less exact than a sum may be.
"""

from __future__ import annotations

from itertools import product

import torch
import torch.nn.functional as F

from weft.core import Implementation
from weft.ops.conv2d.spec import output_size


def forward(x: torch.Tensor, weight: torch.Tensor, *, padding: int = 0) -> torch.Tensor:
    rows, columns = output_size(x, weight, padding)
    padded, wide = F.pad(x.float(), (padding,) * 4), weight.float()
    y = wide.new_zeros((x.shape[0], weight.shape[0], rows, columns))
    for c, r, s in product(*map(range, weight.shape[1:])):
        part = padded[:, c : c + 1, r : r + rows, s : s + columns]
        y = torch.addcmul(y, part, wide[:, c, r, s, None, None])
    return y.to(x.dtype)


def backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, padding: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients: the same naive sum for x, and sums over images and pixels for the weight."""
    rows, columns = output_size(x, weight, padding)
    padded, wide, coefficients = F.pad(x.float(), (padding,) * 4), grad.float(), weight.float()
    dpadded, dweight = torch.zeros_like(padded), torch.empty_like(coefficients)
    for r, s in product(*map(range, weight.shape[2:])):
        window = (slice(None), slice(None), slice(r, r + rows), slice(s, s + columns))
        for o in range(weight.shape[0]):
            dpadded[window].addcmul_(wide[:, o : o + 1], coefficients[o, :, r, s, None, None])
            dweight[o, :, r, s] = (wide[:, o : o + 1] * padded[window]).sum((0, 2, 3))
    height, width = x.shape[2:]
    dx = dpadded[:, :, padding : padding + height, padding : padding + width]
    return (
        dx.to(x.dtype).contiguous(),
        dweight.to(x.dtype, memory_format=torch.contiguous_format),
    )


IMPLEMENTATION = Implementation(
    operator="conv2d",
    backend="eager",
    forward=forward,
    backward=backward,
    idea="the naive sum, one channel and place of the window a step",
)
