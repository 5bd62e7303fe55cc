"""Windows and one matrix product. Its weights have names and shapes of their own."""

import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, channels, outputs, width):
        super().__init__()
        conv = nn.Conv1d(channels, outputs, width)
        self.width = width
        self.matrix = nn.Parameter(conv.weight.detach().reshape(outputs, channels * width))
        self.offset = nn.Parameter(conv.bias.detach())

    def forward(self, x):
        windows = F.pad(x, (self.width // 2, self.width // 2)).unfold(2, self.width, 1)
        columns = windows.permute(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)
        return (columns @ self.matrix.t() + self.offset).transpose(1, 2).contiguous()
