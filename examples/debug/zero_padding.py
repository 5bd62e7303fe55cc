"""A softmax in Triton that is wrong for negative rows: lanes beyond the row are 0 and become the maximum.

    TRITON_INTERPRET=1 python examples/debug/zero_padding.py

The kernel stops in Python's debugger, in program 1. There, `p x` shows the zeros behind the row, and
`p tl.max(x, 0)` that the maximum is one of them. The remedy is other=float("-inf").
"""

import torch
import triton
import triton.language as tl


@triton.jit
def softmax_padded(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    # x, y: (rows, columns), contiguous. Program i computes row i.
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + column, mask=column < columns, other=0.0)
    if row == 1:
        breakpoint()  # noqa: T100 (in the interpreter only: no compiler takes it)
    top = tl.max(x, 0)
    e = tl.exp(x - top)
    tl.store(y_ptr + row * columns + column, e / tl.sum(e, 0), mask=column < columns)


if __name__ == "__main__":
    x = torch.tensor([[1.0, 2.0, 3.0], [-101.0, -102.0, -103.0]])
    y = torch.empty_like(x)
    softmax_padded[(2,)](x, y, 3, BLOCK=4)
    print("sums of rows, each should be 1:", y.sum(1).tolist())
