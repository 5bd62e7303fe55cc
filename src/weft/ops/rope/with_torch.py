"""Rotary embedding by torch's complex product (a + i b) (cos + i sin) in float32.

PyTorch has no rotary embedding of its own. One kernel before the product packs the pairs, and one after it
unpacks them.
"""

from __future__ import annotations

import torch

from weft.core import Implementation


def forward(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    wide = x.float()
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    turned = torch.complex(a, b) * torch.complex(cos, sin)
    if interleaved:
        return torch.view_as_real(turned).flatten(-2).to(x.dtype).contiguous()
    return torch.cat((turned.real, turned.imag), -1).to(x.dtype)


def _traced_forward(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    wide = x.float()
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    turned = (a * cos - b * sin, a * sin + b * cos)
    y = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return y.to(x.dtype)


# torch.compile generates no code for complex numbers, and would leave each step of the product a kernel.
forward.compiles = _traced_forward  # type: ignore[attr-defined]

IMPLEMENTATION = Implementation(
    operator="rope",
    backend="torch",
    forward=forward,
    idea="a complex product, in float32",
)
