"""A ReLU in Triton whose last program reads and writes behind its tensors: the mask is missing.

weft debug relu --with examples/debug/missing_mask.py --program 3
"""

import torch
import triton
import triton.language as tl

import weft


@triton.jit
def relu_unmasked(x_ptr, y_ptr, BLOCK: tl.constexpr):
    # x, y: (n,). Program i computes elements i BLOCK to (i + 1) BLOCK, and n may end within them.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, tl.maximum(x, 0.0))


@weft.implementation("relu", backend="triton", name="triton/unmasked")
def relu(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    relu_unmasked[(triton.cdiv(x.numel(), 256),)](x, y, BLOCK=256)
    return y
