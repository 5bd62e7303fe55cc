"""Running sums in float64, rounded once, written where they are wanted."""

import torch
from task import input_t, output_t


def custom_kernel(data: input_t) -> output_t:
    x, output = data
    output.copy_(torch.cumsum(x, dim=0, dtype=torch.float64))
    return output
