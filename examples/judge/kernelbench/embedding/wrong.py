"""The table kept in half precision: three digits of each element."""

import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, rows, width):
        super().__init__()
        self.table = nn.Embedding(rows, width)

    def forward(self, indices):
        return F.embedding(indices, self.table.weight.half()).float()
