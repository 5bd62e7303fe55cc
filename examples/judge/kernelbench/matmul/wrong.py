"""Factors rounded to half precision first: right to three digits."""

import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, a, b):
        return a.half().float() @ b.half().float()
