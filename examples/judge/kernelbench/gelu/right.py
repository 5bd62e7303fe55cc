"""x sigmoid(2u), which is the tanh form exactly, and safe for every x."""

import math

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        u = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return x * torch.sigmoid(2 * u)
