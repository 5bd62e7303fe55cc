"""Lets one in twenty thousand of the negative values through."""

import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.linear = nn.Linear(features, outputs)

    def forward(self, x):
        return F.leaky_relu(self.linear(x), 5e-5)
