"""Products a row at a time, on a CPU: the batch-invariant variants of ``eager``.

A library's product adds up K in an order that depends on the number of rows and on their place. Here each
row is a product of its own, of the same shape, from memory with the same alignment: the library computes all
of them in the same way. The weight is read once for each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.core import Implementation
from weft.core.implementation import with_invariant

Product = Callable[[Tensor, Tensor], Tensor]  # (..., K), (K, N) -> (..., N)


def with_rows(implementation: Implementation) -> Implementation:
    """Return the implementation with a variant for a CPU: its functions with ``product=multiply``."""
    forward, backward = implementation.forward, implementation.backward
    return with_invariant(
        implementation,
        forward=partial(forward, product=multiply),
        backward=backward and partial(backward, product=multiply),
        devices=("cpu",),
    )


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return a (..., K) @ b (K, N); the gradient of ``a`` is computed by rows as well."""
    product: Tensor = _ProductByRows.apply(a.reshape(math.prod(a.shape[:-1]), a.shape[-1]), b)
    return product.view(*a.shape[:-1], b.shape[1])


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[1])
    for i in range(a.shape[0]):
        # Both begin at multiples of 64 bytes, as all memory that torch allocates on a CPU.
        out[i : i + 1] = torch.mm(a[i : i + 1].clone(memory_format=torch.contiguous_format), b)
    return out


class _ProductByRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(a, b)
        return _multiply(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        # The gradient of b adds up the rows of the batch.
        return _multiply(grad, b.t()), torch.mm(a.t(), grad)
