"""A sum in Triton that is right in the interpreter and wrong on a GPU: programs race for the total.

    weft debug sum --with examples/debug/racing_sum.py --program 1

Each program reads the total, adds its own part and writes it back. The interpreter runs the programs one
by one. On a GPU they run at the same time, and parts are lost. tl.atomic_add is the remedy.
"""

import torch
import triton
import triton.language as tl

import weft


@triton.jit
def sum_racing(x_ptr, total_ptr, n, BLOCK: tl.constexpr):
    # x: (n,); total: one float32 number, 0 at first.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32), 0)
    total = tl.load(total_ptr)
    tl.store(total_ptr, total + part)


@weft.implementation("sum", backend="triton", name="triton/racing")
def total(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    result = torch.zeros((), dtype=torch.float32, device=x.device)
    sum_racing[(triton.cdiv(x.numel(), 256),)](x, result, x.numel(), BLOCK=256)
    return result.to(x.dtype)
