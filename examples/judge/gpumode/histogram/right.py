"""Ones added at each value's place."""

import torch
from task import input_t, output_t


def custom_kernel(data: input_t) -> output_t:
    counts = torch.zeros(256, dtype=torch.int64, device=data.device)
    return counts.scatter_add_(0, data, torch.ones_like(data))
