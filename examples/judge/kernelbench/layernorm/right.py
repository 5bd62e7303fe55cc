"""Layer normalisation in Triton: one program a row, mean and variance in two passes over it."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def norm_rows(x_ptr, w_ptr, b_ptr, y_ptr, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(x_ptr + row * columns + at, mask=inside, other=0.0)
    mean = tl.sum(x, axis=0) / columns
    centred = tl.where(inside, x - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / columns
    w = tl.load(w_ptr + at, mask=inside)
    b = tl.load(b_ptr + at, mask=inside)
    y = centred / tl.sqrt(variance + eps) * w + b
    tl.store(y_ptr + row * columns + at, y, mask=inside)


class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.norm = nn.LayerNorm(features)
        nn.init.normal_(self.norm.weight, mean=1.0, std=0.3)
        nn.init.normal_(self.norm.bias, std=0.3)

    def forward(self, x):
        rows, columns = x.shape
        y = torch.empty_like(x)
        norm_rows[(rows,)](
            x,
            self.norm.weight,
            self.norm.bias,
            y,
            columns,
            self.norm.eps,
            BLOCK=triton.next_power_of_2(columns),
        )
        return y
