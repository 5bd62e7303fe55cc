"""The chunked way: some rows' logits, their losses and gradient in place, two products, the next.

Three products of 2 N C V in all, none twice. Between the products a kernel reads a chunk's logits
and writes their gradient over them. The weight's gradient is a sum over chunks, kept in float32: in
bfloat16 each chunk would round it.

The vocabulary is padded to whole 128-byte lines with rows of zeros, a copy of the weight where it
is not so already: cuBLAS has its fast kernels for sizes of that kind alone, and took four times as
long for 50257 columns, however far apart their rows lay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# (logits, targets, losses): the losses written, the logits overwritten by their gradient
Fused = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
LINE = 64  # elements
BUDGET = 320 << 20  # bytes of logits; 16384 x 50304 go in five chunks


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``rows`` of logits are there at a time, computed and differentiated ``at_once`` by
    ``at_once``: few may still be in the L2, many make better products."""

    rows: int
    at_once: int


@cache
def plan(rows: int, inner: int, columns: int, itemsize: int) -> Plan:
    """Chunks of even size within the budget, or half of what the weight's gradient takes, or an
    eighth of all logits.

    A chunk adds to all of that gradient (8 bytes an element, read and written), so that few and
    large ones are better.
    """
    budget = max(BUDGET, columns * inner * 2, rows * columns * itemsize // 8)
    most = max(256, budget // (_padded(columns) * itemsize) // 256 * 256)
    chunks = max(1, -(-rows // most))
    each = min(most, -(-rows // chunks // 256) * 256)
    return Plan(rows=max(1, min(rows, each)), at_once=max(1, min(rows, each)))


def candidates(rows: int, columns: int, itemsize: int) -> list[Plan]:
    """The plans worth timing."""
    room = (384 << 20) // (_padded(columns) * itemsize)
    sizes = [s for s in (1024, 2048, 2816, 3328, 4096) if s <= min(rows, room)] or [rows]
    return [Plan(rows=s, at_once=a) for s in sizes for a in (256, 512, s) if a <= s]


def _padded(columns: int) -> int:
    return -(-columns // LINE) * LINE


def forward(
    fused: Fused, chosen: Plan, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> Tensors:
    """(sum of the losses, dx, dweight) of that sum; dweight in float32."""
    (rows, inner), columns = x.shape, weight.shape[0]
    losses = x.new_empty(rows, dtype=torch.float32)
    dx = x.new_empty(rows, inner)
    table = _whole(weight)
    dweight = x.new_empty(table.shape, dtype=torch.float32)
    if rows == 0:
        return losses.sum(), dx, dweight.zero_()[:columns]
    buffer = x.new_empty(min(rows, chosen.rows), len(table))
    for start in range(0, rows, chosen.rows):
        end = min(rows, start + chosen.rows)
        for first in range(start, end, chosen.at_once):
            last = min(end, first + chosen.at_once)
            logits = buffer[first - start : last - start]
            torch.mm(x[first:last], table.t(), out=logits)
            logits[:, columns:].zero_()  # 0 times what is no number is none
            fused(logits[:, :columns], targets[first:last], losses[first:last])
        gradient = buffer[: end - start]
        torch.mm(gradient, table, out=dx[start:end])
        _add_product(dweight, gradient.t(), x[start:end], first=start == 0)
    return losses.sum(), dx, dweight[:columns]


def _whole(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` with rows of zeros up to whole lines of columns of logits; itself if it has."""
    rows, columns = _padded(weight.shape[0]), weight.shape[1]
    if rows == weight.shape[0]:
        return weight
    table = weight.new_zeros(rows, columns)
    table[: weight.shape[0]] = weight
    return table


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, first: bool) -> None:
    """total (+)= a b, in float32 whatever the factors are; ``first``: what is there is nothing."""
    if a.dtype == torch.float32:
        torch.addmm(total, a, b, beta=0 if first else 1, out=total)
    elif a.device.type != "cuda":  # where the library keeps no float32 sum of half products
        product = a.float() @ b.float()
        total.copy_(product) if first else total.add_(product)
    elif first:
        torch.mm(a, b, out_dtype=torch.float32, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
