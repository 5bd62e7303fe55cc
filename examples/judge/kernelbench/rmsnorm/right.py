"""The same by a dot product of each row with itself, and one multiplication an element."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        squares = torch.linalg.vecdot(x, x).unsqueeze(-1)
        return x * torch.rsqrt(squares / x.shape[-1] + self.eps)
