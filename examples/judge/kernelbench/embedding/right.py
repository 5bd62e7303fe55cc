"""Rows gathered in Triton: one program an index."""

import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def gather(indices_ptr, table_ptr, out_ptr, width, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    row = tl.load(indices_ptr + place)
    at = tl.arange(0, BLOCK)
    inside = at < width
    found = tl.load(table_ptr + row * width + at, mask=inside)
    tl.store(out_ptr + place * width + at, found, mask=inside)


class ModelNew(nn.Module):
    def __init__(self, rows, width):
        super().__init__()
        self.table = nn.Embedding(rows, width)

    def forward(self, indices):
        width = self.table.embedding_dim
        out = torch.empty(*indices.shape, width, device=indices.device)
        block = triton.next_power_of_2(width)
        gather[(indices.numel(),)](indices, self.table.weight, out, width, BLOCK=block)
        return out
