"""Layer normalisation with a weight and a bias that are not the usual ones and zeros."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.norm = nn.LayerNorm(features)
        nn.init.normal_(self.norm.weight, mean=1.0, std=0.3)
        nn.init.normal_(self.norm.bias, std=0.3)

    def forward(self, x):
        return self.norm(x)


def get_inputs():
    return [torch.rand(16, 768)]


def get_init_inputs():
    return [768]
