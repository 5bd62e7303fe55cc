"""The mean of log-sum-exp less the target's logit, row by row."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, logits, targets):
        of_target = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
        return (torch.logsumexp(logits, dim=1) - of_target).mean()
