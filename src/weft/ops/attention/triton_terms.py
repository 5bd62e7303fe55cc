"""Host side of the optional terms in attention's Triton kernels: arguments, and the gradient of a bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.ops.attention import triton_backward as modes
from weft.ops.attention.terms import Terms, summed_to

MAX_STRIDE = 1 << 23  # elements between rows or columns of a bias: offsets in a tile of 128 fit 32 bits


def term_arguments(terms: Terms, q: Tensor, k: Tensor) -> dict[str, Any]:
    """Return the kernel arguments of the terms, by name; ``q`` stands for the tensors that are absent."""
    (b, h, tq, _), tk = q.shape, k.shape[2]
    sinks, slopes, bias = terms
    arguments: dict[str, Any] = {
        "sinks_ptr": q if sinks is None else sinks.contiguous(),
        "slopes_ptr": q,
        "slopes_batch": 0,
        "bias_ptr": q,
        "SINKS": sinks is not None,
        "ALIBI": slopes is not None,
        "BIAS": bias is not None,
    }
    bias_strides: tuple[int, ...] = (0, 0, 0, 1)
    if slopes is not None:
        slopes = slopes.contiguous()
        arguments |= {"slopes_ptr": slopes, "slopes_batch": slopes.expand(b, h).stride(0)}
    if bias is not None:
        if max(bias.stride()[2:]) >= MAX_STRIDE:
            bias = bias.contiguous()
        bias = bias.expand(b, h, tq, tk)  # strides of 0 where it is broadcast
        arguments["bias_ptr"], bias_strides = bias, bias.stride()
    names = ("bias_batch", "bias_head", "bias_row", "bias_column")
    return arguments | dict(zip(names, bias_strides, strict=True))


@dataclass(frozen=True)
class BiasGradient:
    """Plan of a bias's gradient: what the queries' kernel writes, and how that is summed.

    A bias with all queries and keys is written element by element. If its batches are broadcast, there is a
    launch for each batch, which adds to the elements of the launches before: the order is fixed, and the
    memory is that of one batch. If its heads are broadcast, the sum over them follows. If queries or keys
    are broadcast, a program sums its own, and the sum over programs follows.
    """

    mode: int = 0
    buffer: Tensor | None = None
    batches_a_launch: int = 0

    @staticmethod
    def of(bias: Tensor, q: Tensor, k: Tensor, programs: int) -> BiasGradient:
        """Return the plan; ``programs`` are those of one head's queries."""
        (b, h, tq, _), tk = q.shape, k.shape[2]
        sums_batches, sums_heads, sums_queries, sums_keys = (
            size == 1 and whole > 1 for size, whole in zip(bias.shape, (b, h, tq, tk), strict=True)
        )

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=q.device)  # tiles that are not read stay 0

        if sums_keys:
            return BiasGradient(modes.COLUMNS_SUMMED.value, zeros(b, h, tq, 1), b)
        if sums_queries:
            return BiasGradient(modes.ROWS_SUMMED.value, zeros(b, h, programs, tk), b)
        if sums_batches:
            return BiasGradient(modes.ADDED.value, zeros(1, h, tq, tk), 1)
        dtype = torch.float32 if sums_heads else bias.dtype
        return BiasGradient(modes.WRITTEN.value, zeros(b, h, tq, tk, dtype=dtype), b)

    def arguments(self, q: Tensor) -> dict[str, Any]:
        """Return the kernel's arguments by name, without ``first_batch``."""
        if self.buffer is None:
            return {"dbias_ptr": q, "dbias_batch": 0, "dbias_head": 0, "dbias_row": 0, "DBIAS": 0}
        batch, head, row = self.buffer.stride()[:3]
        batch = 0 if self.buffer.shape[0] == 1 else batch
        strides = {"dbias_batch": batch, "dbias_head": head, "dbias_row": row}
        return {"dbias_ptr": self.buffer, **strides, "DBIAS": self.mode}

    def result(self, bias: Tensor) -> Tensor:
        """Return the gradient; uninitialised memory if none is wanted."""
        return bias.new_empty(bias.shape) if self.buffer is None else summed_to(self.buffer, bias)
