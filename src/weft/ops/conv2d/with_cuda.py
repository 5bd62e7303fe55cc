"""Convolution in CUDA C++: an implicit product by tensor cores for half types, registers for float32.

Half types go by wgmma where it exists (wgmma.py), elsewhere by mma.sync. There the gradient of the images is
the same kernel's convolution with the turned window. The other gradients are PyTorch's own call
(``aten::convolution_backward``), and a backward is recorded as such.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from weft.backends.nvrtc import CudaSource
from weft.core import BACKWARD, YES, Case, Implementation, Support, no
from weft.machine.device_limits import has_wgmma
from weft.ops._common.layout import CUDA_TYPES, FLOAT_DTYPES, contiguous_like, dtype_name
from weft.ops.conv2d import wgmma, with_torch
from weft.ops.conv2d.spec import empty_output

THREADS = 256
MAX_SIDE = 11  # rows and columns of a window whose tile fits static shared memory
# Rows, columns and outputs of a block's tile, and the channels it takes at a time, as in the files.
MMA_TILE, FP32_TILE, CHUNK = (8, 32, 64), (32, 32, 8), 16


@cache
def source(dtype: torch.dtype, window: tuple[int, int]) -> CudaSource:
    """Return the program for one dtype and size of the window."""
    is_half = dtype != torch.float32
    numbers = (("KR", window[0]), ("KS", window[1]))
    return CudaSource(
        file=Path(__file__).with_name("conv2d_mma.cu" if is_half else "conv2d_fp32.cu"),
        kernels=("conv2d", "conv2d_pack") if is_half else ("conv2d",),
        defines=(("WEFT_T", CUDA_TYPES[dtype]), *((name, str(value)) for name, value in numbers)),
        label=f"{dtype_name(dtype)}-{window[0]}x{window[1]}",
    )


def adjacent_columns(x: torch.Tensor) -> torch.Tensor:
    """Return images whose columns are adjacent; a copy only where they are not."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def count_blocks(y: torch.Tensor, tall: int, wide: int, outputs: int) -> int:
    """Return the number of tiles of ``tall`` x ``wide`` pixels and ``outputs`` channels of an output."""
    images, channels, rows, columns = y.shape
    return images * -(-channels // outputs) * -(-rows // tall) * -(-columns // wide)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return a half type's weights (O, C, R, S) in the order of the tensor cores' fragments."""
    outputs, channels, *window = weight.shape
    groups = -(-outputs // 16)
    fragments = -(-channels // CHUNK) * window[0] * window[1] * groups
    packed = torch.empty(fragments * 128, dtype=torch.int32, device=weight.device)
    program = source(weight.dtype, (window[0], window[1]))
    arguments = (weight.contiguous(), packed, outputs, channels, groups, fragments)
    program["conv2d_pack"](-(-fragments * 32 // THREADS), THREADS, *arguments)
    return packed


def forward(x: torch.Tensor, weight: torch.Tensor, *, padding: int = 0) -> torch.Tensor:
    y = empty_output(x, weight, padding)
    if y.numel() == 0:
        return y
    if has_wgmma(x.device) and wgmma.supports(x, weight, padding):
        wgmma.forward(x, weight, y, padding)
        return y
    x = adjacent_columns(x)
    is_half = x.dtype != torch.float32
    tall, wide, outputs = MMA_TILE if is_half else FP32_TILE
    factor = pack(weight) if is_half else weight.contiguous()
    sizes = (*x.shape[1:], *y.shape[1:], padding, *x.stride()[:3])
    groups = (-(-weight.shape[0] // 16),) if is_half else ()
    program = source(x.dtype, (weight.shape[2], weight.shape[3]))
    program["conv2d"](count_blocks(y, tall, wide, outputs), THREADS, x, factor, y, *sizes, *groups)
    return y


def backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, padding: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both gradients; that of square windows' images by wgmma, where it exists."""
    window, turned_padding = weight.shape[2], weight.shape[2] - 1 - padding
    is_square = window == weight.shape[3] and turned_padding >= 0 and grad.numel() > 0
    if not (is_square and has_wgmma(x.device) and wgmma.supports(grad, weight, turned_padding)):
        return with_torch.backward(grad, x, weight, padding=padding)
    dx = contiguous_like(x)
    wgmma.forward(grad, weight.flip(2, 3).transpose(0, 1), dx, turned_padding)
    return dx, with_torch.weight_gradient(grad, x, weight, padding)


def supports(case: Case, device: str) -> Support:
    if max(case.inputs[1].shape[2:]) > MAX_SIDE:
        return no(f"the kernels have room for windows of at most {MAX_SIDE} x {MAX_SIDE}; use impl='torch'")
    return YES


IMPLEMENTATION = Implementation(
    operator="conv2d",
    backend="cuda",
    forward=forward,
    backward=backward,
    supports=supports,
    delegates_to_torch=(BACKWARD,),
    aot_kernels=(
        *(source(d, w) for d in FLOAT_DTYPES for w in ((1, 1), (3, 3), (11, 11))),
        *wgmma.aot_kernels(),
    ),
    idea="implicit product by wgmma or mma.sync with the image's tile in shared memory; float32 by registers",
)
