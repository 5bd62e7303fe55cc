"""The usual mistake: masked loads, and a store without a mask."""

import torch
import triton
import triton.language as tl

BLOCK = 64  # elements a program


@triton.jit
def add_kernel(x_ptr, y_ptr, z_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(z_ptr + offsets, x + y)


def add(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    """Write x + y to z; all have n elements, contiguous."""
    n = x.numel()
    add_kernel[(triton.cdiv(n, BLOCK),)](x, y, z, n, BLOCK=BLOCK)
