"""Each term rounded to half precision: nothing, beside sums of a thousand."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        return torch.cumsum(x.half().float(), dim=1)
