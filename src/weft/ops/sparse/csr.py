"""From torch's sparse tensors to the three tensors of CSR that Weft's sparse products take, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.core import WeftError
from weft.ops.sparse.spec import MAX_INT32


def parts(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``values``, ``columns`` (int32) and ``offsets`` of a sparse matrix of torch.

    ``matrix`` is a ``torch.sparse_csr`` tensor with two dimensions, or a ``torch.sparse_coo`` one, whose
    entries are sorted by row, and whose entries of one place are added up. Values and offsets of a CSR tensor
    are its own; torch's int64 columns are copied to int32, at 12 bytes a nonzero: take the parts once for
    many products. Raises :class:`WeftError` for any other tensor.
    """
    if not isinstance(matrix, Tensor) or matrix.layout not in (torch.sparse_csr, torch.sparse_coo):
        got = matrix.layout if isinstance(matrix, Tensor) else type(matrix).__name__
        hint = "matrix.to_sparse_csr()"
        raise WeftError(
            "sparse matrix", expected="a torch.sparse_csr or sparse_coo tensor", got=got, hint=hint
        )
    if matrix.dim() != 2:
        raise WeftError(
            "sparse matrix", expected="2 dimensions", got=f"{matrix.dim()}, {tuple(matrix.shape)}"
        )
    if matrix.shape[1] > MAX_INT32:
        raise WeftError("sparse matrix: columns", expected=f"at most {MAX_INT32}", got=matrix.shape[1])
    if matrix.layout == torch.sparse_coo:
        matrix = matrix.coalesce().to_sparse_csr()
    if matrix.values().dim() != 1:
        raise WeftError("sparse matrix", expected="a number for each nonzero", got="a block for each nonzero")
    return matrix.values(), matrix.col_indices().int(), matrix.crow_indices()


def from_coo(rows: Tensor, columns: Tensor, values: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``values``, ``columns`` (int32) and ``offsets`` (int64) of entries in any order (COO).

    ``rows`` and ``columns`` are integers from 0, one of each for a value. Two stable sorts order the entries
    by row and column; entries of one place stay as they are, in the given order, and a product adds them up.
    All of it runs on the tensors' device and the host waits for nothing. Rows out of range are not looked
    for: ``weft.ops.sparse.spec.check_indices`` reads columns and offsets, and finds them too. Raises
    :class:`WeftError` if the lengths differ.
    """
    if not rows.shape == columns.shape == values.shape or rows.dim() != 1:
        got = ", ".join(str(tuple(t.shape)) for t in (rows, columns, values))
        raise WeftError("COO", expected="rows, columns and values of one length", got=got)
    order = columns.argsort(stable=True)
    order = order[rows[order].argsort(stable=True)]
    sorted_rows = rows[order].contiguous()
    ends = torch.arange(num_rows + 1, device=rows.device, dtype=rows.dtype)
    return values[order], columns[order].int(), torch.searchsorted(sorted_rows, ends)
