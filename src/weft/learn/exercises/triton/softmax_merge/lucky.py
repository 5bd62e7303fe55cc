"""sums relative to 0: right while every maximum is below 88"""

import torch


def merge(m_a, s_a, m_b, s_b):
    total = s_a * torch.exp(m_a) + s_b * torch.exp(m_b)
    m = torch.maximum(m_a, m_b)
    return m, torch.where(m == float("-inf"), 0.0, total / torch.exp(m))
