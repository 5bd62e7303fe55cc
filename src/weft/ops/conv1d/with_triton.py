"""Depthwise causal convolution in Triton: a program has a piece of a row, and loads it once a coefficient.

The backward writes x's gradient and the sums of each piece in one pass; a second kernel adds these.
"""

from __future__ import annotations

import torch

from weft.backends.triton_jit import INTERPRETED, TritonAotKernel, tl, triton
from weft.core import Implementation
from weft.ops._common.add_parts_triton import add_parts, aot_add_parts
from weft.ops._common.layout import contiguous_like, view_3d

BLOCK, WARPS = 2048, 4  # elements and warps of a program
MIN_BLOCK = 64


@triton.jit
def conv1d_piece(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    channels,
    length,
    batch_stride,
    row_stride,
    pieces,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # x: (batches, channels, length) with strides; weight: (channels, TAPS); bias: (channels,); y: contiguous.
    # Bytes: n read, of which the caches serve all loads but one in TAPS, and n written.
    row = tl.program_id(0).to(tl.int64) // pieces
    channel = row % channels
    at = tl.program_id(0).to(tl.int64) % pieces * BLOCK + tl.arange(0, BLOCK)
    source = x_ptr + row // channels * batch_stride + channel * row_stride
    total = tl.zeros((BLOCK,), tl.float32) + tl.load(bias_ptr + channel).to(tl.float32)
    for k in tl.static_range(TAPS):
        early = at - (TAPS - 1) + k
        x = tl.load(source + early, mask=(early >= 0) & (early < length), other=0.0).to(tl.float32)
        total += tl.load(weight_ptr + channel * TAPS + k).to(tl.float32) * x
    tl.store(y_ptr + row * length + at, total.to(y_ptr.dtype.element_ty), mask=at < length)


@triton.jit
def conv1d_backward_piece(
    grad_ptr,
    x_ptr,
    weight_ptr,
    dx_ptr,
    parts_ptr,
    channels,
    length,
    grad_batch_stride,
    grad_row_stride,
    x_batch_stride,
    x_row_stride,
    pieces,
    count,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # grad, x: (batches, channels, length) with strides of their own; dx: contiguous; parts: (channels,
    # TAPS + 1, batches * pieces) float32. x at t meets the gradient at t + TAPS-1 - k under coefficient k.
    row = tl.program_id(0).to(tl.int64) // pieces
    piece = tl.program_id(0).to(tl.int64) % pieces
    batch, channel = row // channels, row % channels
    at = piece * BLOCK + tl.arange(0, BLOCK)
    gradients = grad_ptr + batch * grad_batch_stride + channel * grad_row_stride
    x = tl.load(x_ptr + batch * x_batch_stride + channel * x_row_stride + at, mask=at < length, other=0.0)
    x = x.to(tl.float32)
    part = parts_ptr + channel * (TAPS + 1) * count + batch * pieces + piece
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TAPS):
        late = at + TAPS - 1 - k
        grad = tl.load(gradients + late, mask=late < length, other=0.0).to(tl.float32)
        total += tl.load(weight_ptr + channel * TAPS + k).to(tl.float32) * grad
        # An x whose gradient is beyond the row is in no term, also where it is NaN.
        tl.store(part + k * count, tl.sum(grad * tl.where(late < length, x, 0.0), 0))
    grad = tl.load(gradients + at, mask=at < length, other=0.0).to(tl.float32)
    tl.store(part + TAPS * count, tl.sum(grad, 0))
    tl.store(dx_ptr + row * length + at, total.to(dx_ptr.dtype.element_ty), mask=at < length)


def _blocks(length: int) -> tuple[int, int, int]:
    """Return the elements of a piece, the pieces of a row, and a program's warps."""
    # Interpreted, a row has several pieces from 256 elements on.
    block = min(256 if INTERPRETED else BLOCK, max(MIN_BLOCK, triton.next_power_of_2(length)))
    return block, triton.cdiv(length, block), max(1, min(WARPS, block // 256))


def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = contiguous_like(x)
    if x.numel() == 0:
        return y
    x3d = view_3d(x)
    batches, channels, length = x3d.shape
    block, pieces, warps = _blocks(length)
    conv1d_piece[(batches * channels * pieces,)](
        x3d,
        weight.contiguous(),
        bias.contiguous(),
        y,
        channels,
        length,
        x3d.stride(0),
        x3d.stride(1),
        pieces,
        TAPS=weight.shape[1],
        BLOCK=block,
        num_warps=warps,
    )
    return y


def backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx, (channels, taps) = contiguous_like(x), weight.shape
    if x.numel() == 0:
        return dx, torch.zeros_like(weight).contiguous(), weight.new_zeros(channels)
    grad3d, x3d = view_3d(grad), view_3d(x)
    batches, _, length = x3d.shape
    block, pieces, warps = _blocks(length)
    parts = torch.empty((channels * (taps + 1), batches * pieces), dtype=torch.float32, device=x.device)
    conv1d_backward_piece[(batches * channels * pieces,)](
        grad3d,
        x3d,
        weight.contiguous(),
        dx,
        parts,
        channels,
        length,
        grad3d.stride(0),
        grad3d.stride(1),
        x3d.stride(0),
        x3d.stride(1),
        pieces,
        batches * pieces,
        TAPS=taps,
        BLOCK=block,
        num_warps=warps,
    )
    sums = add_parts(parts, weight.new_empty(channels * (taps + 1))).view(channels, taps + 1)
    # Gradients have memory of their own, in order.
    return dx, sums[:, :taps].contiguous(), sums[:, taps].contiguous()


def _aot_kernels() -> tuple[TritonAotKernel, ...]:
    kernels = []
    ends = {"pieces": "i32", "TAPS": 4, "BLOCK": BLOCK}
    for dtype in ("fp32", "fp16", "bf16"):
        names = ("x_ptr", "weight_ptr", "bias_ptr", "y_ptr")
        strides = dict.fromkeys(("batch_stride", "row_stride"), "i32:16")
        kernels.append(
            TritonAotKernel(
                label=f"conv1d_piece-{dtype}",
                kernel=conv1d_piece,
                signature={
                    **dict.fromkeys(names, f"*{dtype}"),
                    "channels": "i32:16",
                    "length": "i32:16",
                    **strides,
                    **ends,
                },
                num_warps=WARPS,
            )
        )
        names = ("grad_ptr", "x_ptr", "weight_ptr", "dx_ptr")
        both = {f"{of}_{name}": kind for of in ("grad", "x") for name, kind in strides.items()}
        kernels.append(
            TritonAotKernel(
                label=f"conv1d_backward_piece-{dtype}",
                kernel=conv1d_backward_piece,
                signature={
                    **dict.fromkeys(names, f"*{dtype}"),
                    "parts_ptr": "*fp32",
                    "channels": "i32:16",
                    "length": "i32:16",
                    **both,
                    "pieces": "i32",
                    "count": "i32",
                    "TAPS": 4,
                    "BLOCK": BLOCK,
                },
                num_warps=WARPS,
            )
        )
        kernels.append(aot_add_parts(dtype))
    return tuple(kernels)


IMPLEMENTATION = Implementation(
    operator="conv1d",
    backend="triton",
    forward=forward,
    backward=backward,
    aot_kernels=_aot_kernels(),
    idea="a piece of a row for each program, loaded once a coefficient; sums in a fixed order",
)
