"""Sums kept in float16: each of hundreds of additions is rounded."""

import torch
from task import input_t, output_t


def custom_kernel(data: input_t) -> output_t:
    a, b = data
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    for k in range(a.shape[1]):
        total += a[:, k, None] * b[None, k, :]
    return total
