"""The matrix product by its definition: multiply, sum, in float32, a bounded piece at a time."""

from __future__ import annotations

import torch

from weft.core import YES, Case, Implementation, Support, no
from weft.core.implementation import anywhere, with_invariant
from weft.ops._common.products import by_rows
from weft.ops.matmul.spec import sizes

MAX_PRODUCTS_AT_ONCE = 1 << 22  # 16 MiB in float32
MAX_PRODUCTS = 1 << 27  # M N K: 512 MiB written and read again


def forward(a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee") -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    # Converted once, outside the pieces, so that autograd too sums gradients in float32.
    wide_a, wide_b = a.float(), b.float()
    if m == 0 or n == 0:
        return _sum_of_products(wide_a, wide_b).to(a.dtype)
    columns = min(n, max(1, MAX_PRODUCTS_AT_ONCE // max(k, 1)))
    rows = max(1, MAX_PRODUCTS_AT_ONCE // max(k * columns, 1))
    strips = [
        torch.cat([_sum_of_products(x, y) for y in wide_b.split(columns, dim=1)], dim=1)
        for x in wide_a.split(rows)
    ]
    return torch.cat(strips).to(a.dtype)


def _sum_of_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a[:, :, None] * b[None, :, :]).sum(dim=1)


def supports(case: Case, device: str) -> Support:
    m, n, k = sizes(case)
    if m * n * k > MAX_PRODUCTS:
        return no(f"eager computes all {m * n * k} products one by one (limit {MAX_PRODUCTS}); use torch")
    if case.params.get("precision") == "tf32" and device == "cpu":
        return no("a CPU has no tf32; use precision='ieee' there")
    return YES


def forward_by_rows(a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee") -> torch.Tensor:
    return by_rows.multiply(a, b)


IMPLEMENTATION = with_invariant(
    Implementation(
        operator="matmul",
        backend="eager",
        forward=forward,
        supports=supports,
        idea="multiply and sum, by definition",
    ),
    forward=forward_by_rows,
    supports=anywhere,
    devices=("cpu",),
)
