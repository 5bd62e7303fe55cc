"""In two levels: sums within pieces of 64, and the sums of the pieces before."""

import torch.nn as nn

PIECE = 64


class ModelNew(nn.Module):
    def forward(self, x):
        rows, columns = x.shape
        within = x.view(rows, columns // PIECE, PIECE).cumsum(-1)
        totals = within[..., -1]
        before = totals.cumsum(-1) - totals
        return (within + before.unsqueeze(-1)).view(rows, columns)
