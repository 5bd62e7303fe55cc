"""The sum in Triton, 1024 elements a program."""

import torch
import triton
import triton.language as tl
from task import input_t, output_t


@triton.jit
def add(a_ptr, b_ptr, c_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    a = tl.load(a_ptr + at, mask=inside)
    b = tl.load(b_ptr + at, mask=inside)
    tl.store(c_ptr + at, a + b, mask=inside)


def custom_kernel(data: input_t) -> output_t:
    a, b = data
    assert a.is_cuda and b.is_cuda
    c = torch.empty_like(a)
    add[(triton.cdiv(a.numel(), 1024),)](a, b, c, a.numel(), BLOCK=1024)
    return c
