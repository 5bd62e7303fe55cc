"""Products of a sparse matrix in CSR with a vector (``spmv``) and with a dense matrix (``spmm``).

Row i of the result is the sum of ``values[k] * x[columns[k]]`` over k from ``offsets[i]`` to
``offsets[i + 1]``. Columns may come in any order and more than once. The storage is that of Y. Saad,
"Iterative methods for sparse linear systems", section 3.4.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from weft.core import FORWARD, Case, Cost, Operator, Property, Tolerance, WeftError
from weft.core.cases import ITEMSIZE
from weft.ops._common import validate
from weft.ops._common.offsets import check_range, piece_numbers
from weft.ops.sparse.cases import DTYPES, GPU, cases_of, draw, family_of, sparse_case

MAX_INT32 = 2**31 - 1
SPMM_COLUMNS = 5  # of the dense factor in small cases: no vector's width divides it


def reference(values: Tensor, columns: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
    """Add up the products of each row in float64, whose error is far below every tolerance."""
    rows = offsets.shape[0] - 1
    scale = values if dense.dim() == 1 else values[:, None]
    zeros = dense.new_zeros((rows, *dense.shape[1:]))
    return zeros.index_add(0, piece_numbers(offsets, values.shape[0]), scale * dense[columns.long()])


def check_arguments(name: str, values: Any, columns: Any, offsets: Any, dense: Any) -> None:
    """Raise :class:`WeftError` if the arguments do not fit; :func:`check_indices` reads the indices."""
    factor, dims = ("x", 1) if name == "spmv" else ("b", 2)
    validate.tensor(name, "values", values, DTYPES, dims=range(1, 2))
    validate.tensor(name, "columns", columns, ("int32",), dims=range(1, 2))
    validate.tensor(name, "offsets", offsets, ("int32", "int64"), dims=range(1, 2))
    validate.tensor(name, factor, dense, DTYPES, dims=range(dims, dims + 1))
    validate.same(name, f"values and {factor}", values, dense)
    validate.same_device(name, "values and columns", values, columns)
    validate.same_device(name, "values and offsets", values, offsets)
    if columns.shape[0] != values.shape[0]:
        raise WeftError(
            f"{name}: columns",
            expected=f"{values.shape[0]} entries, as values has",
            got=columns.shape[0],
        )
    if dense.shape[0] > MAX_INT32:
        expected = f"at most {MAX_INT32} rows, which int32 columns can name"
        raise WeftError(f"{name}: {factor}", expected=expected, got=dense.shape[0])
    if offsets.shape[0] == 0:
        hint = "offsets has one entry more than there are rows: 0 first, the number of nonzeros last"
        raise WeftError(f"{name}: offsets", expected="at least one entry", got=0, hint=hint)
    if offsets.dtype == torch.int32 and values.shape[0] > MAX_INT32:
        raise WeftError(
            f"{name}: offsets of {values.shape[0]} nonzeros",
            expected="int64, since int32 ends at 2^31 - 1",
            got="int32",
            hint="offsets.long() of offsets that did not overflow when they were made",
        )


def check_indices(name: str, columns: Tensor, offsets: Tensor, size: int) -> None:
    """Raise :class:`WeftError` if an index is out of range or an offset is below the one before it.

    ``size`` is the number of columns. It reads all indices: on a GPU it waits for the device.
    """
    nonzeros = columns.shape[0]
    check_range(f"{name}: offsets", offsets, nonzeros, "row")
    if nonzeros:
        low, high = (int(v) for v in torch.aminmax(columns))
        if low < 0 or high >= size:
            expected = f"at least 0 and below {size}, the columns of the matrix"
            raise WeftError(f"{name}: columns", expected=expected, got=low if low < 0 else high)


def cost(c: Case, direction: str) -> Cost:
    """Count each input once and the output once; of the dense factor at most a row for each nonzero."""
    values, columns, offsets, dense = c.inputs
    item, k = ITEMSIZE[c.dtype], math.prod(dense.shape[1:])
    rows, nonzeros = offsets.shape[0] - 1, values.shape[0]
    matrix = values.numel * item + columns.nbytes + offsets.nbytes
    named = min(dense.shape[0], nonzeros) * k * item
    if direction == FORWARD:
        return Cost(read=matrix + named, written=rows * k * item, flops=2.0 * nonzeros * k)
    # The gradients of the values and of the dense factor.
    return Cost(
        read=matrix + named + rows * k * item,
        written=(nonzeros + dense.shape[0] * k) * item,
        flops=4.0 * nonzeros * k,
    )


def longest_sum(c: Case) -> int:
    """Return the number of terms of the longest row, or of the longest column in a gradient."""
    family = family_of(c)
    return max(family.longest_row, family.rows if family.kind == "duplicates" else 1)


def _empty_rows_are_0(y: Tensor, values: Tensor, columns: Tensor, offsets: Tensor, dense: Tensor) -> float:
    empty = offsets[1:] == offsets[:-1]
    return 0.0 if bool((y[empty] == 0).all()) else math.inf


def _adds_up(y: Tensor, values: Tensor, columns: Tensor, offsets: Tensor, dense: Tensor) -> float:
    """Return how far the sum of all outputs is from the sum of all products, as a share of what is allowed.

    The sum over rows needs no row to be known: it finds products that were lost or counted twice between
    two blocks.
    """
    scale = values.double() if dense.dim() == 1 else values.double()[:, None]
    products = scale * dense.double()[columns.long()]
    if y.numel() == 0 or not bool(products.isfinite().all()):
        return 0.0
    size = products.abs().sum(0)
    eps = torch.finfo(y.dtype).eps
    accumulator = min(torch.finfo(torch.float32).eps, eps)
    allowed = eps * y.double().abs().sum(0) + 64 * accumulator * size
    off = (y.double().sum(0) - products.sum(0)).abs() / allowed.clamp(min=1e-300)
    return float(torch.where(size > 0, off, 0.0).max())


def _operator(name: str, summary: str, formula: str, k: int | None, bench: tuple[Case, ...]) -> Operator:
    factor = "x" if k is None else "b"

    def validate_call(*inputs: Any) -> None:
        check_arguments(name, *inputs)

    return Operator(
        name=name,
        summary=summary,
        formula=formula,
        signature=f"{name}(values, columns, offsets, {factor})",
        reference=reference,
        cases=(*cases_of(k), *bench),
        cost=cost,
        validate=validate_call,
        dtypes=DTYPES,
        differentiable=("values", factor),
        draw=draw,
        tolerance=Tolerance(
            chain=8.0,
            sum_length=longest_sum,
            reason="the order of a row's sum is free, and a library adds a long row in a few lanes",
        ),
        properties=(
            Property(name="empty rows are 0", holds=_empty_rows_are_0),
            Property(name="all rows add up to all products", holds=_adds_up),
        ),
        backward_note="values: a product for each nonzero; the dense factor: the product with the transposed "
        "matrix, whose nonzeros a stable sort by column brings into order",
    )


N = 2**20
GPU_BENCH: dict[str, Any] = {"tags": "bench", "devices": GPU}
SPMV = _operator(
    "spmv",
    "product of a sparse matrix (CSR) and a vector",
    "y_i = sum of values_k x_columns_k over the nonzeros k of row i",
    None,
    (
        *(
            sparse_case(kind, N, N, mean, **GPU_BENCH)
            for kind, mean in (("uniform", 16), ("power-law", 16), ("dense-row", 16), ("banded", 8))
        ),
        sparse_case("uniform", N, N, 16, dtype="bfloat16", **GPU_BENCH),
        sparse_case("stencil", N, N, **GPU_BENCH),
        sparse_case("uniform", 4096, 4096, 16, tags="bench", devices=("cpu",)),
    ),
)
SPMM = _operator(
    "spmm",
    "product of a sparse matrix (CSR) and a dense matrix",
    "y_ij = sum of values_k b_columns_k,j over the nonzeros k of row i",
    SPMM_COLUMNS,
    (
        *(
            sparse_case(kind, N // 4, N // 4, 16, k=64, **GPU_BENCH)
            for kind in ("uniform", "power-law", "dense-row")
        ),
        sparse_case("uniform", N // 4, N // 4, 16, k=64, dtype="bfloat16", **GPU_BENCH),
        sparse_case("uniform", 4096, 4096, 16, k=64, tags="bench", devices=("cpu",)),
    ),
)
