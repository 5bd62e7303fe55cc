"""A softmax in Triton: one program has a whole row in registers, read once and written once.

    weft check softmax --with examples/mine/softmax_triton.py
    weft bench softmax --with examples/mine/softmax_triton.py

Longer rows than a program can hold are refused, with the reason.
"""

import torch
import triton
import triton.language as tl

import weft
from weft.core import YES, Case, Support, no

LONGEST = 16384  # columns that fit one program


@triton.jit
def whole_row(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    # x, y: (rows, columns), contiguous. Program i computes row i. Bytes: n read, n written.
    row = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    in_row = column < columns
    x = tl.load(x_ptr + row + column, mask=in_row, other=float("-inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    y = e / tl.sum(e, 0)
    tl.store(y_ptr + row + column, y.to(y_ptr.dtype.element_ty), mask=in_row)


def supports(case: Case, device: str) -> Support:
    columns = case.inputs[0].shape[-1]
    if columns > LONGEST:
        return no(f"a program holds at most {LONGEST} columns, not {columns}")
    return YES


@weft.implementation(
    "softmax", backend="triton", name="triton/whole-row", supports=supports, idea="one row per program"
)
def softmax(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        columns = x.shape[-1]
        rows, block = x.numel() // columns, triton.next_power_of_2(columns)
        whole_row[(rows,)](x, y, columns, BLOCK=block, num_warps=max(1, min(16, block // 512)))
    return y
