"""Answer: where both maxima are minus infinity, 0 is subtracted in their place."""

import torch


def merge(m_a, s_a, m_b, s_b):
    m = torch.maximum(m_a, m_b)
    shift = torch.where(m == float("-inf"), 0.0, m)
    return m, s_a * torch.exp(m_a - shift) + s_b * torch.exp(m_b - shift)
