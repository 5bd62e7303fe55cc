"""Attention for decoding composed of torch calls: pages are gathered, and all scores are in memory.

Products are in the inputs' dtype, and the softmax is in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weft.core import Implementation
from weft.ops.attention_decode.spec import capacity, factor_of, visible_keys


def gathered(cache: Tensor, block_table: Tensor, lengths: Tensor, paged: bool) -> Tensor:
    """Return keys or values as (B, Hkv, capacity, D), with 0 past each length: 0 times NaN would be NaN."""
    most = capacity(cache, block_table, paged)
    if paged:
        # Entries that name no page are either past a length, or make the output NaN (invalid_pages).
        pages = block_table.long().clamp(0, max(cache.shape[0] - 1, 0))
        cache = cache[pages].transpose(1, 2).flatten(2, 3)
    hidden = torch.arange(most, device=cache.device) >= lengths[:, None]
    return cache.masked_fill(hidden[:, None, :, None], 0)


def invalid_pages(cache: Tensor, block_table: Tensor, lengths: Tensor) -> Tensor:
    """Return True for the sequences (B,) that have an entry within their length that names no page."""
    starts = torch.arange(block_table.shape[1], device=lengths.device) * cache.shape[2]
    is_wrong = (block_table < 0) | (block_table >= cache.shape[0])
    return (is_wrong & (starts < lengths[:, None])).any(1)


def finish(
    out: Tensor, k: Tensor, lengths: Tensor, block_table: Tensor, visible: Tensor, paged: bool
) -> Tensor:
    """Return the output (B, T, H, D): NaN for sequences with invalid pages, and 0 where no key is seen."""
    if paged:
        out = out.masked_fill(invalid_pages(k, block_table, lengths)[:, None, None, None], math.nan)
    return out.masked_fill((visible == 0)[:, :, None, None], 0).contiguous()


def has_no_keys(q: Tensor, k: Tensor, block_table: Tensor, paged: bool) -> bool:
    """True if the output is empty, or 0 because no sequence has room for a key or there are no pages."""
    return q.numel() == 0 or k.shape[0] == 0 or capacity(k, block_table, paged) == 0


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    *,
    scale: float | None = None,
    paged: bool = False,
) -> Tensor:
    if has_no_keys(q, k, block_table, paged):
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    (b, t, h, d), kv_heads = q.shape, k.shape[1]
    most = capacity(k, block_table, paged)
    visible, lengths = visible_keys(lengths, t, most), lengths.clamp(0, most)
    own_k, own_v = (gathered(x, block_table, lengths, paged) for x in (k, v))
    # The queries that share a head of keys are rows of one product.
    rows = q.unflatten(2, (kv_heads, h // kv_heads)).transpose(1, 2).reshape(b, kv_heads, -1, d)
    s = (rows @ own_k.transpose(-1, -2)).float() * factor_of(scale, d)
    seen = torch.arange(most, device=q.device) < visible[:, :, None]
    s = s.view(b, kv_heads, t, -1, most).masked_fill(~seen[:, None, :, None], -math.inf)
    p = torch.softmax(s, -1).to(v.dtype).view(b, kv_heads, -1, most)
    out = (p @ own_v).view(b, kv_heads, t, -1, d).transpose(1, 2).reshape(b, t, h, d)
    return finish(out, k, lengths, block_table, visible, paged)


IMPLEMENTATION = Implementation(
    operator="attention_decode",
    backend="eager",
    forward=forward,
    directions=("forward",),
    idea="pages gathered, all scores in memory: product, softmax, product",
)
