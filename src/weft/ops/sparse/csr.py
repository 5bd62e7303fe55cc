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
