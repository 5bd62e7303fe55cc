"""Attention for decoding by torch's scaled_dot_product_attention with a mask; pages are gathered first.

PyTorch has no call for a cache with lengths on the device: keys and values past a length are set to 0 in a
copy, since a mask does not keep a NaN among the values from the output.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core import Implementation
from weft.ops.attention_decode.spec import capacity, factor_of, visible_keys
from weft.ops.attention_decode.with_eager import finish, gathered, has_no_keys

MAX_BATCH = 65535  # batches of one launch: a limit of the second and third size of a grid


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
    most, t = capacity(k, block_table, paged), q.shape[1]
    visible, lengths = visible_keys(lengths, t, most), lengths.clamp(0, most)
    if q.is_cpu and not paged and not torch.compiler.is_compiling():
        # Lengths on a CPU cost nothing to read: no more keys are copied than the longest sequence has.
        most = max(int(lengths.max()), 1)
        k, v = k[:, :, :most], v[:, :, :most]
    own_k, own_v = (gathered(x, block_table, lengths, paged) for x in (k, v))
    # A row without any key would be NaN; it sees all keys here, and is set to 0 at the end.
    seen = (torch.arange(most, device=q.device) < visible[:, :, None]) | (visible == 0)[:, :, None]
    own_q = q.transpose(1, 2)
    if q.is_cuda:
        # SDPA's kernel for a mask reads 16 bytes at a time: a query between two multiples ended the process.
        own_q = own_q.clone()
    call = partial(
        F.scaled_dot_product_attention,
        scale=factor_of(scale, q.shape[3]),
        enable_gqa=q.shape[2] != k.shape[1],
    )
    tensors = (own_q, own_k, own_v, seen[:, None])
    # PyTorch's fused kernels raise beyond the limits of a grid.
    if q.shape[0] > MAX_BATCH:
        parts = zip(*(x.split(MAX_BATCH) for x in tensors), strict=True)
        out = torch.cat([call(*part) for part in parts])
    else:
        out = call(*tensors)
    return finish(out.transpose(1, 2), k, lengths, block_table, visible, paged)


IMPLEMENTATION = Implementation(
    operator="attention_decode",
    backend="torch",
    forward=forward,
    directions=("forward",),
    deterministic=False,  # SDPA with a mask gave other bits in one of six calls on an H200
    idea="pages gathered, then SDPA with a mask",
)
