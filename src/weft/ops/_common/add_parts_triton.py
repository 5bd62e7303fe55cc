"""Sums of partial sums in Triton: the second pass of a gradient that adds up all elements of a tensor."""

from __future__ import annotations

import torch

from weft.backends.triton_jit import TritonAotKernel, tl, triton

BLOCK, WARPS = 1024, 4


@triton.jit
def add_parts_kernel(parts_ptr, out_ptr, count, BLOCK: tl.constexpr):
    # parts: (programs, count) float32; out: (programs,). Sums of tiles are added in float64: the order of a
    # long chain costs nothing.
    row = parts_ptr + tl.program_id(0).to(tl.int64) * count
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(row + at, mask=at < count, other=0.0).to(tl.float64)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0).to(tl.float32).to(out_ptr.dtype.element_ty))


def add_parts(parts: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Add the rows of ``parts`` (N, count) float32 into ``out`` (N,), contiguous, and return it.

    The order of the additions follows from the shape alone.
    """
    rows, count = parts.shape
    block = min(BLOCK, max(32, triton.next_power_of_2(count)))
    add_parts_kernel[(rows,)](parts, out, count, BLOCK=block, num_warps=max(1, min(WARPS, block // 256)))
    return out


def aot_add_parts(dtype: str) -> TritonAotKernel:
    """Return the kernel for an output of ``dtype``, such as ``bf16``."""
    return TritonAotKernel(
        label=f"add_parts-{dtype}",
        kernel=add_parts_kernel,
        signature={"parts_ptr": "*fp32", "out_ptr": f"*{dtype}", "count": "i32", "BLOCK": BLOCK},
        num_warps=WARPS,
    )
