"""Softmax over rows of many columns: every answer is small, so that a loose check sees nothing."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        return torch.softmax(x, dim=1)


def get_inputs():
    return [torch.rand(4, 16384)]


def get_init_inputs():
    return []
