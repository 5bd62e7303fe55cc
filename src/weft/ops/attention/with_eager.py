"""Attention composed by hand from torch calls, all scores in memory; ``compile`` fuses what it can.

Products are in the inputs' dtype, as autocast would make them, and the softmax in float32.
"""

from __future__ import annotations

import math

import torch

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.ops._shared.philox import scale as kept_scale
from weft.ops.attention.spec import default_scale, keeps


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_lengths: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    padded: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    if k.shape[2] == 0 or q.numel() == 0:
        nothing = torch.full(q.shape[:3], -math.inf, dtype=torch.float32, device=q.device)
        return (q * 0 + 0 * (k.sum() + v.sum())).contiguous(), nothing
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    factor = default_scale(q.shape[-1]) if scale is None else scale
    s = (q @ k.transpose(-1, -2)).float() * factor
    hidden = _hidden(s, key_lengths, causal, padded)
    if hidden is not None:
        s = s.masked_fill(hidden, -math.inf)
    top = s.amax(-1, keepdim=True).detach()
    if padded:  # where no key is seen: -inf - -inf would be NaN
        top = top.clamp(min=torch.finfo(torch.float32).min)
    e = torch.exp(s - top)
    total = e.sum(-1, keepdim=True)
    lse = (top + total.detach().log())[..., 0]
    p = e / (total.masked_fill(total == 0, 1.0) if padded else total)
    if dropout_p:
        shape = (s.shape[0] * s.shape[1], *s.shape[2:])
        p = p * keeps(dropout_p, seed, 0, shape, s.device).view(s.shape) * kept_scale(dropout_p)
    return (p.to(v.dtype) @ v).contiguous(), lse


def _hidden(
    s: torch.Tensor, key_lengths: torch.Tensor, causal: bool, padded: bool
) -> torch.Tensor | None:
    """Which scores count for nothing; None for none."""
    if not (causal or padded):
        return None
    key = torch.arange(s.shape[3], device=s.device)
    hidden = torch.zeros((), dtype=torch.bool, device=s.device)
    if causal:
        hidden = hidden | (key > torch.arange(s.shape[2], device=s.device)[:, None])
    if padded:
        hidden = hidden | (key >= key_lengths[:, None, None, None])
    return hidden


IMPLEMENTATION = Implementation(
    operator="attention",
    name="eager",
    backend="eager",
    forward=forward,
    idea="all scores in memory: product, softmax, product",
)
COMPILED = compiled(IMPLEMENTATION)
