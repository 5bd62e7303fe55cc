"""Sums kept in float16, two products at a time: each of hundreds of additions is rounded."""

import torch
from task import input_t, output_t


def custom_kernel(data: input_t) -> output_t:
    a, b = data
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    for k in range(0, a.shape[1], 2):
        total += a[:, k : k + 2] @ b[k : k + 2]
    return total
