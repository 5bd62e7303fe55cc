"""Sums and scans of segments composed of torch calls, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.backends.inductor import compiled
from weft.core import Implementation
from weft.ops.segments.spec import scan_reference, sum_backward


def forward_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """Take each segment's last sum of the scan, whose additions form a tree: index_add's are a chain."""
    scan = scan_reference(values.float(), offsets)
    begins, ends = offsets[:-1], offsets[1:]
    if values.shape[-1] == 0:
        # A sum of nothing, not new zeros: torch.compile differentiates it.
        return values.sum(-1, keepdim=True).expand(*values.shape[:-1], begins.shape[0]).clone()
    last = scan.index_select(-1, (ends - 1).clamp(0, values.shape[-1] - 1))
    return last.masked_fill(begins >= ends, 0.0).to(values.dtype)


def forward_scan(x: Tensor, offsets: Tensor, *, exclusive: bool = False, reverse: bool = False) -> Tensor:
    y = scan_reference(x.float(), offsets, exclusive=exclusive, reverse=reverse)
    # A row of one element has been neither copied nor converted so far.
    return y.to(x.dtype, memory_format=torch.contiguous_format, copy=True)


def backward_scan(
    grad: Tensor, offsets: Tensor, *, exclusive: bool = False, reverse: bool = False
) -> tuple[Tensor]:
    return (forward_scan(grad, offsets, exclusive=exclusive, reverse=not reverse),)


SEGMENTED_SUM = Implementation(
    operator="segmented_sum",
    backend="eager",
    forward=forward_sum,
    backward=sum_backward,
    idea="the last sums of a segmented scan by log2(n) shifted additions",
)
SEGMENTED_SUM_COMPILED = compiled(SEGMENTED_SUM)
SEGMENTED_CUMSUM = Implementation(
    operator="segmented_cumsum",
    backend="eager",
    forward=forward_scan,
    backward=backward_scan,
    idea="log2(n) shifted additions within segments (Hillis and Steele)",
)
SEGMENTED_CUMSUM_COMPILED = compiled(SEGMENTED_CUMSUM)
