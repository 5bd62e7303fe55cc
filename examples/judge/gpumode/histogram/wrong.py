"""The last value is left out: one count of 256 is wrong."""

import torch
from task import input_t, output_t


def custom_kernel(data: input_t) -> output_t:
    counts = torch.zeros(256, dtype=torch.int64, device=data.device)
    kept = data[data < 255]
    return counts.scatter_add_(0, kept, torch.ones_like(kept))
