"""Rotary embedding in Triton: a program rotates the same positions of several heads.

It reads the cosines and sines once for them. The backward is the same kernel with the sines negated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from weft.backends.triton_jit import TritonAotKernel, tl, triton
from weft.core import Implementation
from weft.core.implementation import with_invariant


@dataclass(frozen=True, kw_only=True)
class Config:
    """A program of ``warps`` warps rotates ``positions`` positions of ``heads`` heads."""

    positions: int
    heads: int = 4
    warps: int = 4


@triton.jit
def rotated(a, b, c, s):
    """Return (a c - b s, b c + a s) with the product that is rounded by itself written out.

    The compiler could fuse either product with the sum, and not the same one for each alignment: the bits of
    an element would depend on the address of its row.
    """
    return tl.fma(a, c, -(b * s)), tl.fma(b, c, a * s)


@triton.jit
def rope_turn(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    all_heads,
    heads,
    length,
    half,
    batch_stride,
    head_stride,
    stride,
    BACK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    POSITIONS: tl.constexpr,
    HALF: tl.constexpr,
):
    # x: (all_heads / heads, heads, length, 2 half) by strides, with adjacent elements; y: the same,
    # contiguous; cos, sin: (length, half) float32. A program has POSITIONS positions of HEADS heads. Bytes: x
    # read, y written, the tables once for HEADS heads.
    blocks = tl.cdiv(length, POSITIONS)
    first = (tl.program_id(0) // blocks) * HEADS
    t = (tl.program_id(0) % blocks) * POSITIONS + tl.arange(0, POSITIONS)[:, None]
    i = tl.arange(0, HALF)[None, :]
    # HALF is a power of two, as `tl.arange` needs; `half` may be smaller.
    inside = (t < length) & (i < half)
    c = tl.load(cos_ptr + t * half + i, mask=inside, other=0)
    s = tl.load(sin_ptr + t * half + i, mask=inside, other=0)
    # A rotation's transpose turns back by the same angle.
    if BACK:
        s = -s
    # c and s stay in registers: the tables are read once for HEADS heads.
    for h in tl.static_range(HEADS):
        head = (first + h).to(tl.int64)
        in_bounds = inside & (head < all_heads)
        x = x_ptr + (head // heads) * batch_stride + (head % heads) * head_stride
        # int64 offsets: batch * heads * length * size may exceed 2^31.
        x += t.to(tl.int64) * stride
        # `head` is int64, and with it this offset.
        y = y_ptr + (head * length + t) * (2 * half)
        if INTERLEAVED:
            columns = tl.arange(0, 2 * HALF)[None, :]
            pairs_inside = (t < length) & (head < all_heads) & (columns < 2 * half)
            pair = tl.load(x + columns, mask=pairs_inside, other=0).to(tl.float32)
            # Pairs are adjacent in one 16-byte vector of a thread, so that the split moves no data between
            # threads.
            a, b = tl.split(tl.reshape(pair, (POSITIONS, HALF, 2)))
            a, b = rotated(a, b, c, s)
            pair = tl.reshape(tl.join(a, b), (POSITIONS, 2 * HALF))
            tl.store(y + columns, pair.to(y_ptr.dtype.element_ty), mask=pairs_inside)
        else:
            a = tl.load(x + i, mask=in_bounds, other=0).to(tl.float32)
            b = tl.load(x + half + i, mask=in_bounds, other=0).to(tl.float32)
            a, b = rotated(a, b, c, s)
            tl.store(y + i, a.to(y_ptr.dtype.element_ty), mask=in_bounds)
            tl.store(y + half + i, b.to(y_ptr.dtype.element_ty), mask=in_bounds)


@cache
def configure(half: int, itemsize: int, all_heads: int) -> Config:
    """Return the shipped configuration: 16 bytes of each half for each thread, and up to four heads."""
    wide = triton.next_power_of_2(half)
    # Four heads share a table's loads; more would need more registers for rows in flight.
    heads = min(4, triton.next_power_of_2(all_heads))
    # 128 threads of 16 bytes each, divided by the elements of a half.
    return Config(positions=max(1, 128 * 16 // itemsize // wide), heads=heads)


def candidates(half: int, itemsize: int) -> list[Config]:
    """Return the configurations worth timing."""
    wide = triton.next_power_of_2(half)
    configs = []
    for warps in (2, 4, 8):
        for bytes_ in (16, 32):
            positions = max(1, 32 * warps * bytes_ // itemsize // wide)
            configs += [Config(positions=positions, heads=h, warps=warps) for h in (1, 2, 4, 8)]
    return configs


def turn_with(
    config: Config,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    is_backward: bool,
) -> torch.Tensor:
    """Compute either direction with one configuration; ``x`` (or the gradient) is not empty."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    batch, heads, length, size = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    grid = (triton.cdiv(length, config.positions) * triton.cdiv(batch * heads, config.heads),)
    rope_turn[grid](
        x,
        cos.contiguous(),
        sin.contiguous(),
        y,
        batch * heads,
        heads,
        length,
        size // 2,
        x.stride(0),
        x.stride(1),
        x.stride(2),
        BACK=is_backward,
        INTERLEAVED=interleaved,
        HEADS=config.heads,
        POSITIONS=config.positions,
        HALF=triton.next_power_of_2(size // 2),
        num_warps=config.warps,
    )
    return y


def _turn(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, is_backward: bool
) -> torch.Tensor:
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    config = configure(x.shape[3] // 2, x.element_size(), x.shape[0] * x.shape[1])
    return turn_with(config, x, cos, sin, interleaved, is_backward)


def forward(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    return _turn(x, cos, sin, interleaved, False)


def backward(
    grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor]:
    return (_turn(grad, cos, sin, interleaved, True),)


def _aot_kernel(kind: str, itemsize: int, size: int, interleaved: bool, is_backward: bool) -> TritonAotKernel:
    config = configure(size // 2, itemsize, 128)
    pointers = {"x_ptr": f"*{kind}", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "y_ptr": f"*{kind}"}
    sizes = ("all_heads", "heads", "length", "half", "batch_stride", "head_stride", "stride")
    parts = [kind, str(size), *["interleaved"] * interleaved, *["back"] * is_backward]
    return TritonAotKernel(
        label="rope_turn-" + "-".join(parts),
        kernel=rope_turn,
        signature={
            **pointers,
            **dict.fromkeys(sizes, "i32:16"),
            "BACK": is_backward,
            "INTERLEAVED": interleaved,
            "HEADS": config.heads,
            "POSITIONS": config.positions,
            "HALF": size // 2,
        },
        num_warps=config.warps,
    )


IMPLEMENTATION = with_invariant(
    Implementation(
        operator="rope",
        backend="triton",
        forward=forward,
        backward=backward,
        aot_kernels=(
            _aot_kernel("bf16", 2, 128, False, False),
            _aot_kernel("bf16", 2, 128, True, True),
            _aot_kernel("bf16", 2, 64, False, True),
            _aot_kernel("fp32", 4, 128, False, False),
        ),
        idea="tables read once for four heads",
    )
)
