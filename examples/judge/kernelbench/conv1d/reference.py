"""A one-dimensional convolution with padding: weights again, and edges."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, channels, outputs, width):
        super().__init__()
        self.conv = nn.Conv1d(channels, outputs, width, padding=width // 2)

    def forward(self, x):
        return self.conv(x)


def get_inputs():
    return [torch.rand(4, 8, 65)]


def get_init_inputs():
    return [8, 16, 3]
