"""The weight is turned once, in ``setup``, which is declared and so is called again with others."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.linear = nn.Linear(features, outputs)
        self.setup()

    def setup(self):
        self.turned = self.linear.weight.detach().t().contiguous()

    def forward(self, x):
        return torch.addmm(self.linear.bias, x, self.turned).clamp_(min=0.0)
