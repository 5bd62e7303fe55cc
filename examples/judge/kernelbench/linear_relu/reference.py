"""A linear layer and a ReLU: the answer depends on weights."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.linear = nn.Linear(features, outputs)

    def forward(self, x):
        return torch.relu(self.linear(x))


def get_inputs():
    return [torch.rand(33, 100)]


def get_init_inputs():
    return [100, 64]
