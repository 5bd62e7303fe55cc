"""The pattern of a sparse matrix that is multiplied many times with other values, as in training.

A backward needs the transposed matrix. :class:`Pattern` brings its nonzeros into order once, where
``weft.ops.spmv`` and ``spmm`` sort them in every backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft import ops
from weft.core import WeftError
from weft.ops.sparse import transpose, transpose_cuda
from weft.ops.sparse.spec import check_arguments, check_indices


@dataclass(frozen=True, eq=False)
class Pattern:
    """Columns and offsets of a matrix in CSR with ``num_columns`` columns, and its transposition.

    They are copies: the tensors that :meth:`from_csr` was given may change afterwards, and no product can
    meet a transposition of another pattern. A pattern takes 20 bytes for each nonzero, and the offsets of
    both matrices.
    """

    columns: Tensor
    offsets: Tensor
    num_columns: int
    transposition: transpose.Transposition

    @staticmethod
    def from_csr(columns: Tensor, offsets: Tensor, num_columns: int) -> Pattern:
        """Copy a pattern and transpose it.

        Columns and offsets are those of :func:`weft.ops.spmv`. All of them are checked, for which the host
        waits for the device. Raises :class:`WeftError` if they are no pattern of ``num_columns`` columns.
        """
        zeros = (
            torch.empty(columns.shape, device=columns.device),
            torch.empty(num_columns, device=columns.device),
        )
        check_arguments("spmv", zeros[0], columns, offsets, zeros[1])
        check_indices("spmv", columns, offsets, num_columns)
        columns, offsets = columns.clone(), offsets.clone()
        by = transpose_cuda if columns.is_cuda else transpose
        return Pattern(columns, offsets, num_columns, by.transpose(columns, offsets, num_columns))

    def spmv(self, values: Tensor, x: Tensor, *, impl: str | None = None) -> Tensor:
        """Return the product of the matrix with these values and a vector, as :func:`weft.ops.spmv` does.

        The first derivative in ``values`` and ``x`` is there, and no second one. Raises :class:`WeftError` if
        the tensors do not fit.
        """
        return self._product("spmv", values, x, impl)

    def spmm(self, values: Tensor, b: Tensor, *, impl: str | None = None) -> Tensor:
        """Return the product with a dense matrix, as :func:`weft.ops.spmm` does."""
        return self._product("spmm", values, b, impl)

    def _product(self, name: str, values: Tensor, dense: Tensor, impl: str | None) -> Tensor:
        check_arguments(name, values, self.columns, self.offsets, dense)
        if dense.shape[0] != self.num_columns:
            raise WeftError(f"{name}: rows", expected=f"{self.num_columns}", got=dense.shape[0])
        return _Product.apply(values, dense, self, name, impl)  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, dense: Tensor, pattern: Pattern, name: str, impl: str | None
    ) -> Tensor:
        ctx.save_for_backward(values, dense)
        ctx.pattern, ctx.product, ctx.impl = pattern, getattr(ops, name), impl
        return ctx.product(values, pattern.columns, pattern.offsets, dense, impl=impl)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        values, dense = ctx.saved_tensors
        pattern: Pattern = ctx.pattern
        t = pattern.transposition
        dvalues = ddense = None
        if ctx.needs_input_grad[0]:
            by = transpose_cuda if grad.is_cuda else transpose
            dvalues = by.gradient_of_values(grad, t.rows, pattern.columns, dense)
        if ctx.needs_input_grad[1]:
            moved = transpose_cuda.moved_values(values, t.order) if grad.is_cuda else values[t.order]
            ddense = ctx.product(moved, t.columns, t.offsets, grad.contiguous(), impl=ctx.impl)
        return dvalues, ddense, None, None, None
