"""A copy of every second row in Triton that copies the wrong rows; tl.device_print shows which.

    TRITON_INTERPRET=1 python examples/debug/printed_offsets.py

The offset of a row is computed without the stride of the rows: y gets rows 0, 1 and 2 of the whole tensor
instead of rows 0, 2 and 4.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def copy_rows(x_ptr, y_ptr, stride, columns: tl.constexpr):
    # x: (rows, columns), rows `stride` elements apart; y: (rows, columns), contiguous.
    row = tl.program_id(0)
    column = tl.arange(0, columns)
    offset = row * columns  # wrong: row * stride
    tl.device_print("first element: ", offset)
    tl.store(y_ptr + row * columns + column, tl.load(x_ptr + offset + column))


if __name__ == "__main__":
    x = torch.arange(24.0).view(6, 4)[::2]
    y = torch.empty(3, 4)
    copy_rows[(3,)](x, y, x.stride(0), 4)
    print("first elements of rows, should be 0, 8, 16:", y[:, 0].tolist())
