"""Products of a sparse matrix with a vector and with a dense matrix; README.md has the design and times."""

from __future__ import annotations

import torch

from weft.dispatch.operator import Schema, call, register
from weft.ops._common.offsets import can_read
from weft.ops.sparse.spec import check_arguments, check_indices


def _schema(factor: str) -> Schema:
    four = f"Tensor values, Tensor columns, Tensor offsets, Tensor {factor}"
    return Schema(
        inputs=four,
        saved=four,
        gradients=2,
        fake=lambda values, columns, offsets, dense: dense.new_empty(
            (offsets.shape[0] - 1, *dense.shape[1:])
        ),
        fake_backward=lambda grad, values, columns, offsets, dense: (
            values.new_empty(values.shape),
            dense.new_empty(dense.shape),
        ),
    )


register("spmv", _schema("x"))
register("spmm", _schema("b"))


def _call(
    name: str,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    impl: str | None,
    batch_invariant: bool,
) -> torch.Tensor:
    _, columns, offsets, dense = inputs

    def check() -> None:
        check_arguments(name, *inputs)

    if can_read(columns):
        check()
        check_indices(name, columns, offsets, dense.shape[0])
    return call(name, inputs, {}, impl, check, batch_invariant)  # type: ignore[no-any-return]


def spmv(
    values: torch.Tensor,
    columns: torch.Tensor,
    offsets: torch.Tensor,
    x: torch.Tensor,
    *,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return the product of a sparse matrix in CSR and a vector.

    Args:
        values: shape (nonzeros,), the nonzeros row after row; float32, float64, float16 or bfloat16; CPU or
            CUDA.
        columns: (nonzeros,) int32, the column of each, in any order and also more than once in a row.
        offsets: (rows + 1,) int32 or int64: row i has the nonzeros ``offsets[i]`` to ``offsets[i + 1] - 1``.
            ``weft.ops.sparse.csr.parts(matrix)`` returns these three of a ``torch.sparse_csr`` tensor.
        x: (number of columns,), of values' dtype and device.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True is refused: rows are not of one length.

    Returns:
        (rows,), contiguous, of values' dtype and device. An empty row is 0. Sums are in float32, or in
        float64 for that dtype, and are rounded once. Differentiable in ``values`` and ``x``; a backward sorts
        the nonzeros by column, so that its sums have one order.

    Raises:
        WeftError: shapes, dtypes or devices do not fit; on a CPU, a column or an offset is out of range;
            ``impl`` is unknown or does not run here.

    On a GPU no call reads the indices on the host, which would wait for the device. ``eager``, ``triton`` and
    ``cuda`` never use a column out of range as an address: its row is NaN, and its gradient is dropped.
    Offsets that fall, or that do not run from 0 to the number of nonzeros, give unspecified numbers there.
    ``torch`` hands all indices to the library unread. ``weft.ops.sparse.spec.check_indices`` reads them and
    raises.

    Source: D. Merrill and M. Garland, "Merge-based parallel sparse matrix-vector multiplication", SC16.
    """
    return _call("spmv", (values, columns, offsets, x), impl, batch_invariant)


def spmm(
    values: torch.Tensor,
    columns: torch.Tensor,
    offsets: torch.Tensor,
    b: torch.Tensor,
    *,
    impl: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Return the product of a sparse matrix in CSR and a dense matrix.

    Args:
        values, columns, offsets: the sparse matrix, as :func:`spmv` takes it; float32, float64, float16 or
            bfloat16.
        b: shape (number of columns, K), of values' dtype and device.
        impl: an implementation's name (``weft ops`` lists them); None lets dispatch choose.
        batch_invariant: True is refused: rows are not of one length.

    Returns:
        (rows, K), contiguous, of values' dtype and device, with the sums and the gradients of :func:`spmv`.

    Raises:
        WeftError: as :func:`spmv`.

    Source: C. Yang, A. Buluc and J. D. Owens, "Design principles for sparse matrix multiplication on the
    GPU", Euro-Par 2018.
    """
    return _call("spmm", (values, columns, offsets, b), impl, batch_invariant)
