"""The chunked LM head: logits of some rows, their losses and gradient in place, two products, the next rows.

Three products of 2 N C V FLOPs in all, none twice. Between the products a kernel reads a chunk's logits and
writes their gradient over them. The weight's gradient is a sum over chunks and stays in float32 until the
end: in bfloat16 each chunk would round it.

The vocabulary is padded to whole 128-byte lines with rows of zeros, in a copy of the weight if it is not a
multiple already. cuBLAS has its fast kernels for such sizes alone: with 50257 columns it took four times as
long, whatever the row stride (docs/log.md, 2026-11-21).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from weft.ops.losses.spec import weight_gradient_dtype

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# (logits, targets, losses): writes the losses, and overwrites the logits by their gradient.
FusedRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
PADDING = 64  # columns: 128 bytes of a half type
LOGITS_BUDGET = 320 << 20  # bytes; 16384 x 50304 in bfloat16 take five chunks


@dataclass(frozen=True, kw_only=True)
class ChunkPlan:
    """``rows`` of logits are stored at a time, computed and differentiated in steps of ``step_rows``.

    Small steps may still be in the L2 when they are read again; large steps make better products.
    """

    rows: int
    step_rows: int


@cache
def plan_chunks(rows: int, inner: int, columns: int, itemsize: int) -> ChunkPlan:
    """Return chunks of even size within the largest of three budgets.

    These are LOGITS_BUDGET, half of the float32 gradient of the weight, and an eighth of all logits. A
    chunk reads and writes all of the weight's gradient (8 bytes per element), so that few large chunks
    are faster.
    """
    budget = max(LOGITS_BUDGET, columns * inner * 2, rows * columns * itemsize // 8)
    # A multiple of 256 rows, so that the products have whole tiles.
    max_rows = max(256, budget // (_padded(columns) * itemsize) // 256 * 256)
    chunks = max(1, -(-rows // max_rows))
    even_rows = min(max_rows, -(-rows // chunks // 256) * 256)
    chunk_rows = max(1, min(rows, even_rows))
    return ChunkPlan(rows=chunk_rows, step_rows=chunk_rows)


def candidates(rows: int, columns: int, itemsize: int) -> list[ChunkPlan]:
    """Return the plans worth timing."""
    max_rows = (384 << 20) // (_padded(columns) * itemsize)
    sizes = [s for s in (1024, 2048, 2816, 3328, 4096) if s <= min(rows, max_rows)] or [rows]
    return [ChunkPlan(rows=s, step_rows=a) for s in sizes for a in (256, 512, s) if a <= s]


def _padded(columns: int) -> int:
    return -(-columns // PADDING) * PADDING


def chunked_forward(
    fused_rows: FusedRows, plan: ChunkPlan, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> Tensors:
    """Return (sum of the losses, dx, dweight) of that sum, whose dtype is ``weight_gradient_dtype``."""
    (rows, inner), columns = x.shape, weight.shape[0]
    losses = x.new_empty(rows, dtype=torch.float32)
    dx = x.new_empty(rows, inner)
    padded_weight = _pad_rows(weight)
    dweight = x.new_empty(padded_weight.shape, dtype=torch.float32)
    if rows == 0:
        return losses.sum(), dx, _rounded(dweight.zero_()[:columns], x.dtype)
    # One buffer for all chunks: the peak memory is one chunk of logits.
    buffer = x.new_empty(min(rows, plan.rows), len(padded_weight))
    for start in range(0, rows, plan.rows):
        end = min(rows, start + plan.rows)
        for first in range(start, end, plan.step_rows):
            last = min(end, first + plan.step_rows)
            logits = buffer[first - start : last - start]
            torch.mm(x[first:last], padded_weight.t(), out=logits)
            # The padding is a factor of the two products below, where 0 times NaN would be NaN.
            logits[:, columns:].zero_()
            fused_rows(logits[:, :columns], targets[first:last], losses[first:last])
        gradient = buffer[: end - start]
        torch.mm(gradient, padded_weight, out=dx[start:end])
        # The first chunk overwrites: dweight need not be cleared.
        _add_product(dweight, gradient.t(), x[start:end], first=start == 0)
    del buffer, logits, gradient  # the copy of dweight takes their memory
    return losses.sum(), dx, _rounded(dweight[:columns], x.dtype)


def _rounded(dweight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return dweight.to(weight_gradient_dtype(dtype)).contiguous()


def _pad_rows(weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight`` with rows of zeros up to a multiple of PADDING; itself if it is one."""
    rows, columns = _padded(weight.shape[0]), weight.shape[1]
    if rows == weight.shape[0]:
        return weight
    padded = weight.new_zeros(rows, columns)
    padded[: weight.shape[0]] = weight
    return padded


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, first: bool) -> None:
    """Add a b to ``total``, in float32 for every dtype of the factors; ``first`` overwrites ``total``."""
    if a.dtype == torch.float32:
        torch.addmm(total, a, b, beta=0 if first else 1, out=total)
    elif a.device.type != "cuda":  # a CPU's library has no product of half types with a float32 result
        product = a.float() @ b.float()
        total.copy_(product) if first else total.add_(product)
    elif first:
        torch.mm(a, b, out_dtype=torch.float32, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
