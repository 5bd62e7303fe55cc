"""Bias and GELU in CUDA C++: 16 bytes a thread; the bias's gradient in strips; see bias_gelu.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from weft.core import Implementation
from weft.ops._shared.elementwise import THREADS, Walk, contiguous_like

WALK = Walk(
    Path(__file__).with_name("bias_gelu.cu"),
    "bias_gelu_forward",
    "bias_gelu_backward",
    more=("bias_gelu_sum_partials",),
)
STRIPS = 16  # a multiprocessor, so that the last ones to end leave little of the machine idle


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _wide(columns: int, *tensors: torch.Tensor) -> bool:
    size = tensors[0].element_size()
    return columns * size % 16 == 0 and all(t.data_ptr() % 16 == 0 for t in tensors)


def forward(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = contiguous_like(x)
    columns = x.shape[-1]
    x, bias = x.contiguous(), bias.contiguous()
    WALK.run("bias_gelu_forward", (x, y), bias, columns, wide=_wide(columns, bias))
    return y


def backward(
    grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dbias = contiguous_like(x), contiguous_like(bias)
    if not x.numel():
        return dx, dbias.zero_()
    grad, x, bias = grad.contiguous(), x.contiguous(), bias.contiguous()
    columns = x.shape[-1]
    rows = x.numel() // columns
    wide = _wide(columns, grad, x, bias, dx)
    across = -(-columns // (32 * (16 // x.element_size() if wide else 1)))
    least = THREADS // 32 * 2
    strips = max(1, min(STRIPS * _multiprocessors(x.device) // across, rows // least, 65535))
    each = -(-rows // strips)
    strips = -(-rows // each)
    partial = torch.empty(strips, columns, dtype=torch.float32, device=x.device)
    program = WALK.sources[x.dtype]
    sizes = (rows, columns, each)
    kernel = program["bias_gelu_backward_wide" if wide else "bias_gelu_backward_any"]
    kernel((across, strips), THREADS, grad, x, bias, dx, partial, *sizes)
    program["bias_gelu_sum_partials"](-(-columns // 32), 512, partial, dbias, strips, columns)
    return dx, dbias


IMPLEMENTATION = Implementation(
    operator="bias_gelu",
    name="cuda",
    backend="cuda",
    forward=forward,
    backward=backward,
    specimens=WALK.specimens,
    idea="one 16-byte vector a thread; the bias's gradient in strips",
)
