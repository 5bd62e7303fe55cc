"""Attention composed of torch calls, with all scores in memory; ``compile`` fuses what it can.

Products are in the inputs' dtype, as under autocast, and the softmax is in float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.core.implementation import with_invariant
from weft.ops._common.philox import keep_scale
from weft.ops.attention import ordered
from weft.ops.attention.mask import Mask
from weft.ops.attention.spec import AttentionOptions, dropout_mask
from weft.ops.attention.terms import Terms


def forward(
    q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor, *extras: Tensor, **params: Any
) -> tuple[Tensor, Tensor]:
    options = AttentionOptions(**params)
    terms = Terms.of(extras, options.terms)
    sinks = None if terms.sinks is None else terms.sinks.float()[:, None, None]
    if k.shape[2] == 0 or q.numel() == 0:
        lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float32, device=q.device)
        lse = lse if sinks is None else lse.copy_(sinks[..., 0].detach().expand_as(lse))
        # The result depends on all inputs, so that each gets a gradient of 0.
        nothing = sum((x[:0].sum().to(q.dtype) for x in (k, v, *extras)), start=q.new_zeros(()))
        return (q * 0 + nothing).contiguous(), lse
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = (q @ k.transpose(-1, -2)).float() * options.factor(q.shape[-1])
    if cap := options.softcap:
        s = cap * torch.tanh(s / cap)
    added = terms.added(s.shape[2], s.shape[3], _shift(s, key_lengths, options.mask))
    if added is not None:
        s = s + added
    hidden = _hidden(s, key_lengths, options.mask)
    if hidden is not None:
        s = s.masked_fill(hidden, -math.inf)
    top = s.amax(-1, keepdim=True).detach()
    if sinks is not None:
        top = torch.maximum(top, sinks.detach())
    may_be_empty = options.padded or options.mask.is_band or bool(options.terms)
    if may_be_empty:  # a query that sees no key: -inf - -inf would be NaN
        top = top.clamp(min=torch.finfo(torch.float32).min)
    e = torch.exp(s - top)
    total = e.sum(-1, keepdim=True)
    if sinks is not None:  # one more score, without a value
        total = total + torch.exp(sinks - top)
    lse = (top + total.detach().log())[..., 0]
    p = e / (total.masked_fill(total == 0, 1.0) if may_be_empty else total)
    if dropout_p := options.dropout_p:
        shape = (s.shape[0] * s.shape[1], *s.shape[2:])
        mask = dropout_mask(dropout_p, options.seed, 0, shape, s.device)
        p = p * mask.view(s.shape) * keep_scale(dropout_p)
    return (p.to(v.dtype) @ v).contiguous(), lse


def _shift(s: Tensor, key_lengths: Tensor, mask: Mask) -> Tensor | int:
    """Return the position of query 0 among the keys: a number, or (B, 1, 1, 1)."""
    keys: Any = s.shape[3]
    if mask.padded:
        keys = key_lengths.clamp(0, keys)[:, None, None, None]
    return mask.shift(s.shape[2], keys)  # type: ignore[no-any-return]


def _hidden(s: Tensor, key_lengths: Tensor, mask: Mask) -> Tensor | None:
    """Return True for the scores that the masks exclude; None if there is no mask."""
    if not (mask.causal or mask.padded):
        return None
    key, keys = torch.arange(s.shape[3], device=s.device), s.shape[3]
    hidden = torch.zeros((), dtype=torch.bool, device=s.device)
    if mask.padded:
        lengths = key_lengths.clamp(0, keys)[:, None, None, None]
        hidden = hidden | (key >= lengths)
    if mask.causal:
        query = torch.arange(s.shape[2], device=s.device)[:, None]
        hidden = hidden | mask.hides(query, key, lengths if mask.padded else keys, s.shape[2])
    return hidden


IMPLEMENTATION = with_invariant(
    Implementation(
        operator="attention",
        backend="eager",
        forward=forward,
        idea="all scores in memory: product, softmax, product",
    ),
    forward=ordered.forward,
    supports=ordered.supports,
    devices=("cpu",),
)
COMPILED = compiled(IMPLEMENTATION)
