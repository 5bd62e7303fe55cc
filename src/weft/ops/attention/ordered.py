"""Attention by sums in a fixed order, on a CPU: the batch-invariant variant of ``eager``.

Products are sums of float64, one term after the other: over the head's columns, or over the keys from key 0.
Each term is one multiplication and one addition of all elements at once, which IEEE 754 rounds in the same
way in every shape and at every place. A key that a query does not see adds 0. So the bits of a query depend
on it and on the keys that it sees alone: not on batches, heads, other queries, later keys or lengths.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core import YES, Case, Support, no
from weft.ops.attention.layout import empty_output
from weft.ops.attention.mask import Mask
from weft.ops.attention.spec import AttentionOptions

SCORES_AT_ONCE = 1 << 18  # 2 MiB: a term reads and writes this many elements in the cache


def supports(case: Case, device: str) -> Support:
    options = AttentionOptions.of(case)
    if options.dropout_p:
        return no("dropout drops a weight by its position in the batch")
    if options.terms:
        return no(f"batch-invariant attention has no {options.terms}")
    return YES


def forward(q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor, **params: Any) -> tuple[Tensor, Tensor]:
    return _OrderedAttention.apply(q, k, v, key_lengths, AttentionOptions(**params))  # type: ignore[no-any-return]


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a (L, M, K) @ b (L, K, N), added up from the first of the K terms to the last."""
    sums = a.new_zeros(a.shape[0], a.shape[1], b.shape[2])
    for i in range(a.shape[2]):
        sums += a[:, :, i : i + 1] * b[:, i : i + 1]
    return sums


class _Heads(NamedTuple):
    """Some heads in float64: queries (L, Tq, D), keys and values (L, Tk, D), True for hidden keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    hidden: Tensor


class _Weights(NamedTuple):
    """Powers of e (L, Tq, Tk) of scores less the largest of their row, which is ``top`` (L, Tq, 1), and the
    slope of each capped score."""

    powers: Tensor
    top: Tensor
    slope: Tensor | float


def _heads(q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor, mask: Mask) -> list[_Heads]:
    """Return the heads of all batches in pieces of ``SCORES_AT_ONCE``; a head of keys comes once for each
    head of queries."""
    (b, h, tq, _), tk = q.shape, k.shape[2]
    key, query = torch.arange(tk), torch.arange(tq)[:, None]
    keys = key_lengths.clamp(0, tk)[:, None, None] if mask.padded else torch.full((b, 1, 1), tk)
    behind = key >= keys
    hidden = behind | mask.hides(query, key, keys, tq) if mask.causal else behind.expand(b, tq, tk)
    # Keys past a length may be NaN, and 0 times NaN is NaN.
    k, v = (x.double().masked_fill(behind.transpose(1, 2)[:, None], 0.0) for x in (k, v))
    k, v = (x.repeat_interleave(h // x.shape[1], 1).flatten(0, 1) for x in (k, v))
    count = max(1, SCORES_AT_ONCE // (tq * tk))
    lines = hidden.repeat_interleave(h, 0).split(count)
    pieces = zip(q.double().flatten(0, 1).split(count), k.split(count), v.split(count), lines, strict=True)
    return [_Heads(*piece) for piece in pieces]


def _weights(heads: _Heads, options: AttentionOptions) -> _Weights:
    s = product(heads.q, heads.k.transpose(1, 2)) * options.factor(heads.q.shape[2])
    slope: Tensor | float = 1.0
    if cap := options.softcap:
        t = torch.tanh(s / cap)
        s, slope = cap * t, 1 - t * t
    s = s.masked_fill(heads.hidden, -math.inf)
    top = s.amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)  # of a query without keys: -inf - -inf would be NaN
    return _Weights(torch.exp(s - top), top, slope)


def _ones(x: Tensor) -> Tensor:
    return x.new_ones(*x.shape[:2], 1)


class _OrderedAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, key_lengths)
        ctx.options = options
        if q.numel() == 0 or k.numel() == 0:
            out, lse = empty_output(q)
            ctx.mark_non_differentiable(lse)
            return out, lse
        outs, sums = [], []
        for heads in _heads(q, k, v, key_lengths, options.mask):
            weights = _weights(heads, options)
            # The last column of the product is the sum of the powers.
            total = product(weights.powers, torch.cat([heads.v, _ones(heads.v)], dim=2))
            out, total = total[:, :, :-1], total[:, :, -1:]
            outs.append(out / total.masked_fill(total == 0, 1.0))
            sums.append((weights.top + total.log())[:, :, 0])
        lse = torch.cat(sums).view(q.shape[:3]).float()
        ctx.mark_non_differentiable(lse)
        return torch.cat(outs).view(q.shape).to(q.dtype), lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, key_lengths = ctx.saved_tensors
        if q.numel() == 0 or k.numel() == 0:
            return *(torch.zeros_like(x) for x in (q, k, v)), None, None
        options: AttentionOptions = ctx.options
        factor, gradients = options.factor(q.shape[3]), []
        pieces = _heads(q, k, v, key_lengths, options.mask)
        for heads, g in zip(pieces, grad.double().flatten(0, 1).split(len(pieces[0].q)), strict=True):
            weights = _weights(heads, options)
            total = product(weights.powers, _ones(heads.k))
            p = weights.powers / total.masked_fill(total == 0, 1.0)
            dp = product(g, heads.v.transpose(1, 2))
            ds = p * (dp - product(p * dp, _ones(heads.k))) * (weights.slope * factor)
            transposed = ds.transpose(1, 2), p.transpose(1, 2)
            gradients.append(
                (product(ds, heads.k), product(transposed[0], heads.q), product(transposed[1], g))
            )
        dq, dk, dv = (torch.cat(parts) for parts in zip(*gradients, strict=True))
        dk, dv = (_sum_of_groups(x, k) for x in (dk, dv))
        return dq.view(q.shape).to(q.dtype), dk.to(k.dtype), dv.to(k.dtype), None, None


def _sum_of_groups(gradient: Tensor, k: Tensor) -> Tensor:
    """Add the gradients (B H, Tk, D) of the query heads that share a head of keys, in their order."""
    b, kv_heads, tk, d = k.shape
    parts = gradient.view(b, kv_heads, -1, tk, d).unbind(2)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
