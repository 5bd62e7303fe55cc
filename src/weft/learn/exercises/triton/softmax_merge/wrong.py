"""two neutral states give NaN"""

import torch


def merge(m_a, s_a, m_b, s_b):
    m = torch.maximum(m_a, m_b)
    return m, s_a * torch.exp(m_a - m) + s_b * torch.exp(m_b - m)
